"""The programs that ``relax-hetero bench`` times: this library, stock TVM and ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .models import Model
from .onnxruntime_reference import reference
from .run import flatten

# Inputs by ONNX name to outputs, in the model's order.
Call = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Engine:
    """One way to run the model.

    Attributes
    ----------
    name : str
        As the table shows it.
    make : callable
        Compiles the model and returns the call; may raise anything.
    """

    name: str
    make: Callable[[], Call]


def ours(model: Model) -> Engine:
    """Our engine, with the executable that the options asked for."""

    def make() -> Call:
        import relax_hetero as rh

        machine = rh.vm.VirtualMachine(model.executable)

        def call(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return [tensor.numpy() for tensor in flatten(machine["main"](*inputs.values()))]

        return call

    return Engine("relax-hetero", make)


def stock_tvm(path: Path, shapes: Mapping[str, list[int]]) -> Engine:
    """Stock TVM: ``from_onnx`` and ``tvm.compile`` with its default pipeline for this CPU."""

    def make() -> Call:
        import onnx
        import tvm
        from tvm.relax.frontend.onnx import from_onnx

        from ..target.native_target import native

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = from_onnx(onnx.load(str(path)), shape_dict=dict(shapes) or None, keep_params_in_input=False)
        names = [parameter.name for parameter in module["main"].params]
        machine = tvm.relax.VirtualMachine(tvm.compile(module, native("llvm")), tvm.cpu())

        def call(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            arguments = [tvm.runtime.tensor(array) for array in _by_position(inputs, names)]
            return [tensor.numpy() for tensor in flatten(machine["main"](*arguments))]

        return call

    return Engine("stock TVM", make)


def onnx_runtime(path: Path, threads: int) -> Engine:
    """ONNX Runtime's CPU provider."""

    def make() -> Call:
        run = reference(path, threads)
        return lambda inputs: list(run(inputs).values())

    return Engine("ONNX Runtime", make)


def _by_position(inputs: Mapping[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    # Stock TVM rewrites names that are no identifiers; the order is the model's.
    return [inputs[name] for name in names] if set(names) == set(inputs) else list(inputs.values())
