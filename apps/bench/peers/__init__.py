"""The contestants of the matmul benchmark, one file per library."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from .packages import is_installed
from .product import Contestant, Product
from .shape import Unsupported


@dataclass(frozen=True)
class Peer:
    """A contestant that computes products.

    Attributes
    ----------
    name : str
        Name in tables.
    package : str
        Required package, which is also its name in ``--peers``.
    module : str
        The file here that implements it.
    function : str
        Function of that file that makes the contestant.
    four_bits : bool
        If true, it supports weights of 4 bits.
    float16 : bool
        If true, it supports float16.
    """

    name: str
    package: str
    module: str
    function: str = "matmul"
    four_bits: bool = False
    float16: bool = False

    @property
    def installed(self) -> bool:
        """True if its package is installed; nothing is loaded."""
        return is_installed(self.package)

    def make(self, product: Product, threads: int) -> Contestant:
        """Compile it for a product; raises `product.Unsupported`, or an error of the library, if it cannot."""
        if product.kind == "q4" and not self.four_bits:
            raise Unsupported("no weights of 4 bits")
        if product.kind == "f16" and not self.float16:
            raise Unsupported("no products of float16")
        contestant: Contestant = getattr(importlib.import_module(f".{self.module}", __name__), self.function)(
            product, threads
        )
        return contestant


OURS = Peer("relax-hetero", "relax_hetero", "ours", four_bits=True, float16=True)
PEERS = (
    Peer("stock TVM", "tvm", "stock_tvm"),
    Peer("numpy", "numpy", "numpy_blas"),
    Peer("ONNX Runtime", "onnxruntime", "onnx_runtime", four_bits=True),
    Peer("torch", "torch", "torch_cpu", "plain", float16=True),
    Peer("torch packed", "torch", "torch_cpu", "packed", float16=True),
    Peer("OpenVINO", "openvino", "openvino_cpu", four_bits=True),
    Peer("IREE", "iree.compiler", "iree_cpu"),
)


def installed(packages: tuple[str, ...] = ()) -> list[Peer]:
    """The peers whose packages are installed, restricted to `packages` if given (``iree`` is enough)."""
    return [peer for peer in PEERS if peer.installed and (not packages or peer.package.split(".")[0] in packages)]
