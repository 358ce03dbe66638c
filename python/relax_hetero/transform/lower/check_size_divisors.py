"""CheckSizeDivisors: the division of a size by a size of 0 becomes an error.

Before::

    def shape_func(H: T.Buffer((3,), "int64")):
        H[2] = H[0] // H[1]

After::

    def shape_func(H: T.Buffer((3,), "int64")):
        if H[1] == 0:
            T.call_packed("relax_hetero.refuse", 0, 0, 0, 0)
        else:
            H[2] = H[0] // H[1]

Extents such as ``n // m`` are computed by functions that TVM adds, by command buffers and by kernels of CPUs, which
end the process at a division by 0. The latter two check at their beginning. Divisions of loop variables are left
alone: a loop of an extent 0 has no iterations.

Assumes a module whose kernels are scheduled and whose shapes are computed (within LowerToVM). A second run changes
nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import StructuralKey, structural_map

from ...artifact.checks import CheckSpec
from ...tir.checks import REFUSE
from ...tir.core.walks import nodes, replaced
from ..ir.declare import declare_pass
from ..ir.module_attrs import COMMANDS, DIVISORS_CHECKED
from ..ir.remarks import remarks_of, with_remarks
from ..ir.requirements import DIVISIONS, divisors_in
from ..ir.rewriting import with_functions


def check_size_divisors(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; returns the same module where nothing changes."""
    checks = list(remarks_of(mod).checks or ())
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if (
            isinstance(func, tirx.PrimFunc)
            and DIVISORS_CHECKED not in func.attrs
            and not (_is_gpu(func) or isinstance(func.ret_type, tvm.ir.PrimType))
        ):
            guarded = _guarded(mod, func, gv.name_hint, checks)
            if guarded is not None:
                functions[gv] = guarded.with_attr(DIVISORS_CHECKED, True)
    return mod if not functions else with_remarks(with_functions(mod, functions), checks=tuple(checks))


CheckSizeDivisors = declare_pass("CheckSizeDivisors", check_size_divisors)


def _is_gpu(func: tirx.PrimFunc) -> bool:
    target = func.attrs.get("target")
    return target is not None and "gpu" in target.keys and COMMANDS not in func.attrs


def _guarded(mod: tvm.IRModule, func: tirx.PrimFunc, name: str, checks: list[CheckSpec]) -> tirx.PrimFunc | None:
    if "tirx.is_host_func" in func.attrs:
        return _with_guarded_stores(func, checks)
    divisors = dict.fromkeys(_divisors(func), f"a size in kernel {name}")

    @cache  # a model's layers call the same kernels
    def divisors_of(gv: tvm.ir.GlobalVar) -> list[StructuralKey]:
        callee = mod.functions.get(gv)
        return _divisors(callee) if isinstance(callee, tirx.PrimFunc) else []

    for call in nodes(func.body, tvm.ir.Call):
        if not isinstance(call.op, tvm.ir.GlobalVar) or not divisors_of(call.op):
            continue
        params = mod[call.op].params
        arguments = {param: arg for param, arg in zip(params, call.args, strict=True) if not is_buffer_var(param)}
        for key in divisors_of(call.op):
            where = f"a size in kernel {call.op.name_hint}"
            divisors.setdefault(StructuralKey(replaced(key.key, arguments)), where)
    body = func.body
    for key, where in reversed(divisors.items()):
        # The body is the else branch: TVM hoists common subexpressions before the statements that use them.
        body = _guard(key.key, where, checks, body)
    if not divisors:
        return None
    # Around the whole body: temporaries, which the root block allocates, may have such sizes.
    return func.with_body(s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body)))


def _divisors(func: tirx.PrimFunc) -> list[StructuralKey]:
    """Divisors of a kernel's sizes, each once."""
    sizes = _sizes(func)
    if not sizes:
        return []
    divisions = [division for division in nodes(func.body, *DIVISIONS) if _divides_sizes(division, sizes)]
    return list(dict.fromkeys(StructuralKey(division.b) for division in divisions))


def _with_guarded_stores(func: tirx.PrimFunc, checks: list[CheckSpec]) -> tirx.PrimFunc | None:
    """Guard each store of a function that computes shapes, whose sizes are elements of a tensor."""
    has_changed = False

    def store(statement: tirx.BufferStore) -> tirx.Stmt:
        nonlocal has_changed
        guarded: tirx.Stmt = statement
        for key in dict.fromkeys(map(StructuralKey, divisors_in(statement.value))):
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
    """The scalar parameters of a kernel, and the extents of its tensors."""
    sizes: set[tirx.Var] = set()
    for param in func.params:
        if is_buffer_var(param):
            sizes.update(var for extent in param.ty.shape for var in nodes(extent, tvm.ir.Var))
        elif isinstance(param.ty, tvm.ir.PrimType):
            sizes.add(param)
    return sizes


def _divides_sizes(division: Any, sizes: set[tirx.Var]) -> bool:
    """Return whether a division has only sizes and numbers as operands, and a divisor that is not a constant."""
    if isinstance(division.b, tirx.IntImm) or not str(division.ty.dtype).startswith("int"):
        return False
    return not nodes(division, TensorLoad, tvm.ir.Call) and sizes.issuperset(nodes(division, tvm.ir.Var))
