"""TVMScript of modules with devices: in a line what a test's module would repeat before its first function."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

import tvm
from tvm.script import ir as I
from tvm.script.parser.core.diagnostics import Source


def _vdevice(device: str | dict[str, Any] | tuple[Any, ...]) -> tvm.relax.VDevice:
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        device = (kind, int(number or 0))
    return I.vdevice(*device) if isinstance(device, tuple) else I.vdevice(device)


def ir_module(*devices: str | dict[str, Any] | tuple[Any, ...], pure: bool = True) -> Callable[[Any], tvm.IRModule]:
    """Parse a class as ``@I.ir_module`` does, or a Relax function as the ``main`` of a module of its own.

    Parameters
    ----------
    devices : str, dict or tuple
        The module's vdevices: a kind with its ``vdevice_id`` (``"llvm:1"``), a target, or the arguments of
        ``I.vdevice``. Without any the module has no global infos.
    pure : bool
        Whether the function is pure, as in ``@R.function(pure=...)``.
    """
    caller = sys._getframe(1)

    def parse(definition: Any) -> tvm.IRModule:
        (tree,) = ast.parse(Source(definition).source).body
        assert isinstance(tree, ast.ClassDef | ast.FunctionDef)
        if isinstance(tree, ast.FunctionDef):
            tree.name, tree.decorator_list = "main", [ast.parse(f"R.function(pure={pure})", mode="eval").body]
            tree = ast.ClassDef("Module", bases=[], keywords=[], body=[tree], decorator_list=[])
        if devices:
            tree.body[:0] = ast.parse('I.module_global_infos({"vdevice": VDEVICES})').body
        names = {**caller.f_globals, **caller.f_locals, "I": I, "VDEVICES": list(map(_vdevice, devices))}
        return tvm.script.from_source(ast.unparse(ast.fix_missing_locations(tree)), extra_vars=names)

    return parse
