"""This library on a PyTorch network, imported by `rh.from_torch`, without an ONNX file."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch_bench.networks import build

import relax_hetero as rh

from . import Inputs, Session, Setting
from .ours import native_target


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import the network that the ONNX file is named after, compile and export."""
    setting.only_float32()
    module, arguments = build(Path(model).stem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod = rh.from_torch(module, arguments, vdevices=[native_target(setting)])
    rh.compile(mod, cache=False).export_library(file)


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """``vm["main"]`` on torch tensors."""
    main = rh.vm.VirtualMachine(rh.load(file))["main"]
    _, arguments = build(Path(model).stem)
    outputs: list[object] = []

    def call() -> None:
        outputs[:] = [main(*arguments)]

    def results() -> list[np.ndarray]:
        (output,) = outputs
        return [torch.from_dlpack(field).numpy() for field in (output if isinstance(output, tuple) else (output,))]

    return Session(call, results)
