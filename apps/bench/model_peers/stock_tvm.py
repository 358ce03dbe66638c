"""Stock TVM: its own importer and ``tvm.compile`` with the default pipeline for this CPU."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from tvm.relax.frontend.onnx import from_onnx

from . import Inputs, Session, Setting
from .ours import native_target, tensors_of


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import, compile for this CPU and export."""
    setting.only_float32()
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    mod = from_onnx(onnx.load(model), shape_dict=shapes, keep_params_in_input=False)
    tvm.compile(mod, native_target(setting)).export_library(file)


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The virtual machine's function on tensors; it allocates its results."""
    main = tvm.relax.VirtualMachine(tvm.runtime.load_module(file), tvm.cpu())["main"]
    operands = tensors_of(inputs)
    outputs: list[object] = []

    def call() -> None:
        outputs[:] = [main(*operands)]

    def results() -> list[np.ndarray]:
        (output,) = outputs
        fields = [output] if isinstance(output, tvm.runtime.Tensor) else list(output)
        return [field.numpy() for field in fields]

    return Session(call, results)
