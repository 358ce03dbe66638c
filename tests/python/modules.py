"""Modules of tests: written with their devices in one line, checked through a pass, and asked for their ops."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script.parser.core.diagnostics import Source
from tvm_ffi import structural_walk

from relax_hetero.transform.ir.rewriting import op_name, relax_functions, typed, walk_bindings, with_functions


def _vdevice(device: str | dict[str, Any] | tuple[Any, ...]) -> tvm.relax.VDevice:
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        device = (kind, int(number or 0))
    return I.vdevice(*device) if isinstance(device, tuple) else I.vdevice(device)


def ir_module(
    *devices: str | dict[str, Any] | tuple[Any, ...],
    pure: bool = True,
    kernels: Mapping[str, tirx.PrimFunc] | None = None,
) -> Callable[[Any], tvm.IRModule]:
    """Parse a class as ``@I.ir_module`` does, or a Relax function as the ``main`` of a module of its own.

    Parameters
    ----------
    devices : str, dict or tuple
        The module's vdevices: a kind with its ``vdevice_id`` (``"llvm:1"``), a target, or the arguments of
        ``I.vdevice``. Without any the module lacks global infos.
    pure : bool
        Whether the function is pure, as in ``@R.function(pure=...)``.
    kernels : mapping, optional
        Generated PrimFuncs of the module, by the names that calls refer to.
    """
    caller = sys._getframe(1)
    generated = {typed(tvm.ir.GlobalVar(name), kernel.ty): kernel for name, kernel in (kernels or {}).items()}

    def parse(definition: Any) -> tvm.IRModule:
        (tree,) = ast.parse(Source(definition).source).body
        assert isinstance(tree, ast.ClassDef | ast.FunctionDef)
        if isinstance(tree, ast.FunctionDef):
            tree.name, tree.decorator_list = "main", [ast.parse(f"R.function(pure={pure})", mode="eval").body]
            tree = ast.ClassDef("Module", bases=[], keywords=[], body=[tree], decorator_list=[])
        if devices:
            tree.body[:0] = ast.parse('I.module_global_infos({"vdevice": VDEVICES})').body
        names = {**caller.f_globals, **caller.f_locals, "I": I, "VDEVICES": list(map(_vdevice, devices))}
        names |= {gv.name_hint: gv for gv in generated}
        text = ast.unparse(ast.fix_missing_locations(tree))
        module = tvm.script.from_source(text, extra_vars=names, check_well_formed=not generated)
        return with_functions(module, generated) if generated else module

    return parse


def built_module(build: Callable[..., relax.Expr], *shapes: tuple[Any, ...]) -> tvm.IRModule:
    """A module whose ``main``, of float32 tensors of these shapes, is what `build` emits into a block builder."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *params))
        builder.emit_func_output(result)
    return builder.get()


def check_pass(
    transform: Callable[[tvm.IRModule], tvm.IRModule],
    before: tvm.IRModule,
    expected: tvm.IRModule,
    map_free_vars: bool = False,
) -> tvm.IRModule:
    """Check that a pass makes the expected, well-formed module, leaves its input as it was, and its output as it is."""
    text = tvm.ir.save_json(before)
    after = transform(before)
    assert_structural_equal(after, expected, map_free_vars)
    assert relax.analysis.check_well_formed(after)
    assert transform(after).same_as(after)
    assert tvm.ir.save_json(before) == text
    return after


def values_of(code: tvm.IRModule | relax.Expr) -> list[relax.Expr]:
    """Bound values of a function, or of all Relax functions of a module, those of nested scopes among them."""
    scopes = [func for _, func in relax_functions(code)] if isinstance(code, tvm.IRModule) else [code]
    return [binding.value for scope in scopes for binding in walk_bindings(scope)]


def ops_of(code: tvm.IRModule | relax.Expr) -> list[str | None]:
    """Names of the ops that compute `values_of` code; None for a value of no op."""
    return list(map(op_name, values_of(code)))


def calls_of(op: str, code: tvm.IRModule | relax.Expr) -> list[relax.Call]:
    """Calls of an op in code."""
    return [value for value in values_of(code) if op_name(value) == op]


def callees(body: tvm.ir.Expr | tvm.tirx.Stmt) -> list[str]:
    """Names of the module's functions that code refers to, in order, each as often as it does."""
    names: list[str] = []
    structural_walk(body, (tvm.ir.GlobalVar, lambda gv: names.append(gv.name_hint)))
    return names
