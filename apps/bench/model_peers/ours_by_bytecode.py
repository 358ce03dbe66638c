"""This library without command buffers: the virtual machine's bytecode calls every kernel."""

from __future__ import annotations

import relax_hetero as rh

from . import Inputs, Setting
from .ours import import_model, load

__all__ = ["compile_model", "load"]


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import, compile and export."""
    rh.compile(import_model(model, inputs, setting), command_buffers=False, cache=False).export_library(file)
