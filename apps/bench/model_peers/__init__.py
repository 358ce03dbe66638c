"""The contestants of the model benchmark, one file per library.

Each file has ``load(model, file, inputs, setting) -> Session``; files of libraries that compile ahead of time also have
``compile_model(model, file, inputs, setting)``, which writes ``file``.
Contestants on PyTorch networks (``from_torch``, ``inductor``, ``frozen``, ``eager``) use only the stem of the model's
path, the name of a network of `torch_bench`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from peers.packages import is_installed

Inputs = Mapping[str, np.ndarray]
FLOAT32 = "float32"
PRECISIONS = {FLOAT32: "f32", "bfloat16": "bf16", "float16": "f16"}
"""Precisions of float models, and their short names."""


class Unsupported(Exception):
    """A contestant cannot run a model; its row shows the reason."""


@dataclass(frozen=True)
class Setting:
    """Settings of a contestant.

    Attributes
    ----------
    threads : int
    precision : str
        Precision of float products and convolutions: a key of `PRECISIONS`. Quantized parts of a model stay so.
    isa : str
        Newest instructions, as for `rh.native`; empty for all of this CPU.
    """

    threads: int
    precision: str = FLOAT32
    isa: str = ""

    def only_float32(self) -> None:
        """Raise Unsupported for any precision but float32."""
        if self.precision != FLOAT32:
            raise Unsupported(f"no {self.precision} of a float32 model")


@dataclass(frozen=True)
class Session:
    """A model that is ready to run.

    Attributes
    ----------
    call : Callable
        Runs the model once on the inputs that it was loaded for; this is timed.
    results : Callable
        Returns the outputs of the last call, in the order of the model's outputs.
    note : str
        Note on the timed call, if it needs one.
    products : mapping of str to int
        Number of products and convolutions by precision, if the library reports it.
    """

    call: Callable[[], object]
    results: Callable[[], list[np.ndarray]]
    note: str = ""
    products: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A contestant that runs ONNX models.

    Attributes
    ----------
    key : str
        Name in ``--peers``.
    name : str
        Name in tables.
    package : str
        Required package.
    module : str
        The file here that implements it.
    suffix : str
        Suffix of the file that it compiles to ahead of time; empty if it loads the model itself.
    any_size : bool
        If true, that file serves all sizes of named dimensions.
    held : bool
        If true, it can be held to older instructions (``--isa``).
    """

    key: str
    name: str
    package: str
    module: str
    suffix: str = ""
    any_size: bool = False
    held: bool = True

    @property
    def installed(self) -> bool:
        """True if its package is installed; nothing is loaded."""
        return is_installed(self.package)

    def load_module(self) -> ModuleType:
        """Import its file here."""
        return importlib.import_module(f".{self.module}", __name__)


OURS = "ours"
SYMBOLIC = "symbolic"
FROM_TORCH = "from_torch"
NO_PEERS = (OURS, SYMBOLIC, FROM_TORCH, "bytecode", "ours2", "tvm")
"""Contestants that are left out of ratios; stock TVM's times are for the record."""
PEERS = {
    peer.key: peer
    for peer in (
        Peer(OURS, "relax-hetero", "relax_hetero", "ours", ".so"),
        Peer("onnxruntime", "ONNX Runtime", "onnxruntime", "onnx_runtime", held=False),
        Peer("openvino", "OpenVINO", "openvino", "openvino_cpu"),
        Peer("iree", "IREE", "iree.compiler", "iree_cpu", ".vmfb"),
        Peer("torch", "torch", "torch", "torch_cpu"),
        Peer(SYMBOLIC, "relax-hetero, any size", "relax_hetero", "ours_symbolic", ".so", any_size=True),
        Peer("bytecode", "relax-hetero, no command buffers", "relax_hetero", "ours_by_bytecode", ".so"),
        Peer("ours2", "relax-hetero, two devices", "relax_hetero", "ours_twice", ".so"),
        Peer("tvm", "stock TVM", "tvm", "stock_tvm", ".so"),
        Peer(FROM_TORCH, "relax-hetero, from_torch", "torch", "from_torch", ".so"),
        Peer("inductor", "torch.compile", "torch", "torch_compiled"),
        Peer("frozen", "torch.compile, frozen", "torch", "torch_frozen"),
        Peer("eager", "torch, op by op", "torch", "torch_eager"),
    )
}
