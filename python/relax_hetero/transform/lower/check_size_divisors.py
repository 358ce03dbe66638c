"""CheckSizeDivisors: a size that is divided by a size of 0 becomes an error, before it is.

Before::

    def shape_func(H: T.Buffer((3,), "int64")):
        H[2] = H[0] // H[1]

After::

    def shape_func(H: T.Buffer((3,), "int64")):
        if H[1] == 0:
            T.call_packed("relax_hetero.refuse", 0, 0, 0, 0)
        else:
            H[2] = H[0] // H[1]

Extents such as ``n // m`` are computed by functions that TVM adds, by command buffers and by kernels of CPUs, whose
processors end the process at a division by 0. The latter two say so at their beginning. Divisions of positions are not
meant: where an extent is 0, there are no positions.

Assumes a module whose kernels are scheduled and whose shapes are computed (within LowerToVM). A second run changes
nothing.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import StructuralKey, VisitInterrupt, structural_map, structural_walk

from ...artifact.checks import CheckSpec
from ...tir.checks import REFUSE
from ..ir.declare import declare_pass
from ..ir.module_attrs import COMMANDS, DIVISORS_CHECKED
from ..ir.remarks import remarks_of, with_remarks
from ..ir.requirements import DIVISIONS
from ..ir.rewriting import copy_module


def check_size_divisors(mod: tvm.IRModule) -> tvm.IRModule:
    """The module itself where no size is divided by another."""
    checks = list(remarks_of(mod).checks or ())
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if (
            isinstance(func, tirx.PrimFunc)
            and DIVISORS_CHECKED not in func.attrs
            and not (_is_gpu(func) or _is_raw(func))
        ):
            guarded = _guarded(mod, func, gv.name_hint, checks)
            if guarded is not None:
                functions[gv] = guarded.with_attr(DIVISORS_CHECKED, True)
    if not functions:
        return mod
    return with_remarks(copy_module(mod, {**dict(mod.functions.items()), **functions}), checks=tuple(checks))


CheckSizeDivisors = declare_pass("CheckSizeDivisors", check_size_divisors)


def _is_gpu(func: tirx.PrimFunc) -> bool:
    target = func.attrs.get("target")
    return target is not None and "gpu" in target.keys and COMMANDS not in func.attrs


def _is_raw(func: tirx.PrimFunc) -> bool:
    """Return whether other functions call a kernel, which check for it: its last statement returns a status."""
    return isinstance(func.ret_type, tvm.ir.PrimType)


def _guarded(mod: tvm.IRModule, func: tirx.PrimFunc, name: str, checks: list[CheckSpec]) -> tirx.PrimFunc | None:
    if "tirx.is_host_func" in func.attrs:
        return _with_guarded_stores(func, checks)
    found = dict.fromkeys(_divisors(func), f"a size in kernel {name}")

    def note(call: tvm.ir.Call) -> None:
        callee = mod.functions.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if not isinstance(callee, tirx.PrimFunc):
            return
        given = {param: arg for param, arg in zip(callee.params, call.args, strict=True) if not is_buffer_var(param)}
        for key in _divisors(callee):
            divisor = structural_map(key.key, (tvm.ir.Var, lambda var: given.get(var, var)))
            found.setdefault(StructuralKey(divisor), f"a size in kernel {call.op.name_hint}")

    structural_walk(func.body, (tvm.ir.Call, note))
    body = func.body
    for key, where in reversed(found.items()):
        # The rest is the other branch: TVM computes what is used more than once before the statements that use it.
        body = _guard(key.key, where, checks, body)
    if not found:
        return None
    # Around everything: temporaries, which the root block allocates, may have such sizes.
    return func.with_body(s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body)))


def _divisors(func: tirx.PrimFunc) -> list[StructuralKey]:
    """Divisors of a kernel's sizes, each once."""
    sizes = _sizes(func)
    found: dict[StructuralKey, None] = {}

    def note(division: Any) -> None:
        if _is_of(division, sizes):
            found.setdefault(StructuralKey(division.b))

    structural_walk(func.body, (DIVISIONS, note))
    return list(found)


def _with_guarded_stores(func: tirx.PrimFunc, checks: list[CheckSpec]) -> tirx.PrimFunc | None:
    """A function that computes shapes: its sizes are elements of a tensor, and all it does is to store others."""
    has_changed = False

    def store(statement: tirx.BufferStore) -> tirx.Stmt:
        nonlocal has_changed
        found: dict[StructuralKey, None] = {}

        def note(division: Any) -> None:
            if not isinstance(division.b, tirx.IntImm):
                found.setdefault(StructuralKey(division.b))

        structural_walk(statement.value, (DIVISIONS, note))
        guarded: tirx.Stmt = statement
        for key in found:
            guarded = _guard(key.key, "a size", checks, guarded)
            has_changed = True
        return guarded

    body = structural_map(func.body, (tirx.BufferStore, store))
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs, func.span) if has_changed else None


def _guard(divisor: Any, where: str, checks: list[CheckSpec], rest: tirx.Stmt) -> tirx.Stmt:
    number = len(checks)
    checks.append(CheckSpec("size", where))
    zero = tirx.const(0, "int64")
    call = tirx.call_packed(REFUSE, tirx.const(number, "int64"), zero, zero, zero)
    is_zero = tirx.EQ(divisor, tirx.const(0, str(divisor.ty.dtype)))
    return tirx.IfThenElse(is_zero, tirx.Evaluate(call), rest)


def _sizes(func: tirx.PrimFunc) -> set[tirx.Var]:
    """The numbers that a kernel is called with, and the extents of its tensors."""
    found: set[tirx.Var] = set()
    for param in func.params:
        if is_buffer_var(param):
            for extent in param.ty.shape:
                structural_walk(extent, (tvm.ir.Var, found.add))
        elif isinstance(param.ty, tvm.ir.PrimType):
            found.add(param)
    return found


def _is_of(division: Any, sizes: set[tirx.Var]) -> bool:
    """Return whether a division is one of sizes alone, by what is no constant."""
    if isinstance(division.b, tirx.IntImm) or not str(division.ty.dtype).startswith("int"):
        return False

    def other(var: tvm.ir.Var) -> VisitInterrupt | None:
        return None if var in sizes else VisitInterrupt(var)

    seen = [((TensorLoad, tvm.ir.Call), VisitInterrupt), (tvm.ir.Var, other)]
    return structural_walk(division, seen) is None
