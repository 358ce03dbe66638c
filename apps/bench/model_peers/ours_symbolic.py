"""This library, compiled once for all sizes of named dimensions."""

from __future__ import annotations

import relax_hetero as rh

from . import Inputs, Setting
from .ours import in_precision, load, native_target

__all__ = ["compile_model", "load"]


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import without sizes, compile and export."""
    mod = rh.from_onnx(model, [native_target(setting)])
    rh.compile(in_precision(mod, setting.precision), cache=False).export_library(file)
