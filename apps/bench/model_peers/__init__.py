"""The contestants of the model benchmark, one file per library.

Each file has ``load(model, file, inputs, threads) -> Session``; those that compile ahead of time also have
``compile_model(model, file, inputs, threads)``, which writes ``file``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from packages import is_installed

Inputs = Mapping[str, np.ndarray]


class Unsupported(Exception):
    """What a contestant cannot run, and why; its row says so."""


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
    """

    call: Callable[[], object]
    results: Callable[[], list[np.ndarray]]
    note: str = ""


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
    """

    key: str
    name: str
    package: str
    module: str
    suffix: str = ""

    @property
    def installed(self) -> bool:
        """Whether its package is there; nothing is loaded."""
        return is_installed(self.package)

    def load_module(self) -> ModuleType:
        """Its file here, imported."""
        return importlib.import_module(f".{self.module}", __name__)


OURS = "ours"
NO_PEERS = (OURS, "bytecode", "ours2", "tvm")
"""Those that ratios are not to; of stock TVM the times are for the record."""
PEERS = {
    peer.key: peer
    for peer in (
        Peer(OURS, "relax-hetero", "relax_hetero", "ours", ".so"),
        Peer("onnxruntime", "ONNX Runtime", "onnxruntime", "onnx_runtime"),
        Peer("openvino", "OpenVINO", "openvino", "openvino_cpu"),
        Peer("iree", "IREE", "iree.compiler", "iree_cpu", ".vmfb"),
        Peer("torch", "torch", "torch", "torch_cpu"),
        Peer("bytecode", "relax-hetero, no command buffers", "relax_hetero", "ours_by_bytecode", ".so"),
        Peer("ours2", "relax-hetero, two devices", "relax_hetero", "ours_twice", ".so"),
        Peer("tvm", "stock TVM", "tvm", "stock_tvm", ".so"),
    )
}
