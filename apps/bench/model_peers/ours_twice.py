"""This library over two devices: the first half of a model's nodes on one, the rest on the other, both this CPU."""

from __future__ import annotations

import glob

import onnx

import relax_hetero as rh

from . import Inputs, Session, Setting
from .ours import in_precision, native_target
from .ours import load as load_executable


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import, cut in the middle, compile and export."""
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    vdevices = [rh.VDevice(native_target(setting), index) for index in range(2)]
    mod = rh.from_onnx(model, vdevices, second_half(model), shapes=shapes)
    rh.compile(in_precision(mod, setting.precision), cache=False).export_library(file)


def second_half(model: str) -> list[tuple[str, str]]:
    """Placement rules for the second half of the nodes; a nameless one is named by its type and position."""
    nodes = list(onnx.load(model, load_external_data=False).graph.node)
    names = [node.name or f"{node.op_type}_{index}" for index, node in enumerate(nodes)]
    return [(glob.escape(name), "llvm:1") for name in names[len(names) // 2 :]]


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """The same as on one device."""
    return load_executable(model, file, inputs, setting)
