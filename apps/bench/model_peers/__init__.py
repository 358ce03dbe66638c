"""The contestants of the model benchmark, one file per library.

Each file has ``load(model, file, inputs, setting) -> Session``; those that compile ahead of time also have
``compile_model(model, file, inputs, setting)``, which writes ``file``.
Those of PyTorch networks (``from_torch``, ``inductor``, ``frozen``, ``eager``) take from the model's path only its
stem, the name of a network of `torch_bench`.
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
    """What a contestant cannot run, and why; its row says so."""


@dataclass(frozen=True)
class Setting:
    """How a contestant runs a model.

    Attributes
    ----------
    threads : int
    precision : str
        Of products and convolutions of float tensors: a key of `PRECISIONS`. What a model has quantized stays so.
    """

    threads: int
    precision: str = FLOAT32

    def only_float32(self) -> None:
        """Refuse any other precision, for those that have none."""
        if self.precision != FLOAT32:
            raise Unsupported(f"no {self.precision} of a float32 model")


@dataclass(frozen=True)
class Session:
    """A model that is ready to run.

    Attributes
    ----------
    call : Callable
        Runs it once on the inputs it was loaded for; what is timed.
    results : Callable
        Outputs of the last call, in the order of the model's outputs.
    note : str
        What exactly is timed, where that is not plain.
    products : mapping of str to int
        How many products and convolutions run in which precision, where the library tells.
    """

    call: Callable[[], object]
    results: Callable[[], list[np.ndarray]]
    note: str = ""
    products: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A way to run ONNX models.

    Attributes
    ----------
    key : str
        How ``--peers`` names it.
    name : str
        As tables show it.
    package : str
        What has to be installed for it.
    module : str
        The file here that knows it.
    suffix : str
        Of the file that it compiles to ahead of time; empty where it takes the model itself.
    any_size : bool
        Whether that file serves all sizes of named dimensions.
    """

    key: str
    name: str
    package: str
    module: str
    suffix: str = ""
    any_size: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package is there; nothing is loaded."""
        return is_installed(self.package)

    def load_module(self) -> ModuleType:
        """Its file here, imported."""
        return importlib.import_module(f".{self.module}", __name__)


OURS = "ours"
SYMBOLIC = "symbolic"
FROM_TORCH = "from_torch"
NO_PEERS = (OURS, SYMBOLIC, FROM_TORCH, "bytecode", "ours2", "tvm")
"""Those that ratios are not to; of stock TVM the times are for the record."""
PEERS = {
    peer.key: peer
    for peer in (
        Peer(OURS, "relax-hetero", "relax_hetero", "ours", ".so"),
        Peer("onnxruntime", "ONNX Runtime", "onnxruntime", "onnx_runtime"),
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
