"""Walks over Relax functions that keep all types.

TVM's own mutators infer types again while they rebuild, and stock inference raises on, or loses, the
device of n-ary ops. These walks rebuild only the expressions that change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import relax, tirx

from ...tir.core.walks import nodes, replaced

BindingMap = Callable[[relax.Binding], "relax.Binding | list[relax.Binding]"]


def relax_functions(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """The Relax functions of a module, sorted by name."""
    pairs = [(gv, f) for gv, f in mod.functions.items() if isinstance(f, relax.Function)]
    return sorted(pairs, key=lambda pair: pair[0].name_hint)


def copy_module(mod: tvm.IRModule, functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] | None = None) -> tvm.IRModule:
    """A new module with the same attributes and global infos; `functions` replaces the function table."""
    table = dict(mod.functions.items()) if functions is None else functions
    return tvm.IRModule(table, attrs=mod.attrs, global_infos=mod.global_infos)


def with_functions(mod: tvm.IRModule, functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc]) -> tvm.IRModule:
    """`mod` with some functions replaced or added; the same module if it has all of them already."""
    if all(gv in mod.functions and func.same_as(mod.functions[gv]) for gv, func in functions.items()):
        return mod
    return copy_module(mod, {**dict(mod.functions.items()), **functions})


def without_unused_kernels(mod: tvm.IRModule, kernels: Collection[tvm.ir.GlobalVar]) -> tvm.IRModule:
    """`mod` without those of some kernels that are private and that no Relax function refers to."""
    used = {gv for _, func in relax_functions(mod) for gv in global_vars_in(func.body)}
    unused = {gv for gv in kernels if gv not in used and "global_symbol" not in mod.functions[gv].attrs}
    return copy_module(mod, {gv: func for gv, func in mod.functions.items() if gv not in unused})


def walk_bindings(body: relax.Expr, nested: bool = True) -> Iterator[relax.Binding]:
    """All bindings of `body` in program order; if `nested`, then those of `If` branches and local functions."""
    pending = [body]
    while pending:
        expr = pending.pop()
        if isinstance(expr, relax.Function):
            pending.append(expr.body)
        elif isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings[:]:  # slices of TVM's arrays are faster than iterators
                    yield binding
                    value = binding.value
                    if not nested or isinstance(value, relax.Call):
                        continue
                    if isinstance(value, relax.If):
                        pending += [value.false_branch, value.true_branch]
                    elif isinstance(value, relax.Function):
                        pending.append(value.body)


def walk_scopes(func: relax.Function) -> Iterator[list[relax.Binding]]:
    """The bindings of the function's body, and those of every branch and local function, each in order."""
    pending = [func.body]
    while pending:
        bindings = list(walk_bindings(pending.pop(), nested=False))
        yield bindings
        for binding in bindings:
            value = binding.value
            if isinstance(value, relax.If):
                pending += [value.true_branch, value.false_branch]
            elif isinstance(value, relax.Function):
                pending.append(value.body)


def is_on_gpu(ty: tvm.ir.Type) -> bool:
    """Return whether a type is a tensor on a GPU; False before placement."""
    return isinstance(ty, relax.TensorType) and ty.vdevice is not None and "gpu" in ty.vdevice.target.keys


def map_bindings(func: relax.Function, change: BindingMap) -> relax.Function:
    """`func` with `change` applied to each binding.

    `change` returns its argument itself to keep it, another binding, or a list of bindings in order. Bindings
    inside `If` branches are visited first; unchanged expressions are shared with the old function.
    """
    body = _map_expr(func.body, change)
    return func if body.same_as(func.body) else with_body(func, body)


def with_body(func: relax.Function, body: relax.Expr, params: list[relax.Var] | None = None) -> relax.Function:
    """`func` with another body (and parameters), but the same return type, purity, attributes and span."""
    return relax.Function(
        list(func.params) if params is None else params, body, func.ret_ty, func.is_pure, func.attrs, func.span
    )


def sequence(bindings: list[relax.Binding], result: relax.Expr, ty: tvm.ir.Type | None = None) -> relax.SeqExpr:
    """A body of one block of bindings, or of none. `ty`: its type; default: that of the result."""
    return typed(relax.SeqExpr([relax.BindingBlock(bindings)] if bindings else [], result), ty or result.ty)


def with_fresh_sizes(func: relax.Function) -> relax.Function:
    """The function with symbolic sizes of its own: TVM requires that functions share none."""
    fresh = {var: tirx.Var(var.name, var.ty.dtype) for var in relax.analysis.defined_symbolic_vars(func)}
    return replaced(func, fresh)


def with_distinct_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Rename symbolic sizes that share a name within a function: signatures identify them by name."""
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in relax_functions(mod):
        used: set[str] = set()
        symbols = [symbol for param in func.params for symbol in nodes(param.ty, tvm.ir.Var)]  # these keep their names
        fresh = {}
        for var in dict.fromkeys([*symbols, *relax.analysis.defined_symbolic_vars(func)]):
            name = fresh_name(str(var.name), used)
            if name != var.name:
                fresh[var] = tirx.Var(name, var.ty.dtype)
        functions[gv] = replaced(func, fresh)
    return with_functions(mod, functions)


def _map_expr(expr: relax.Expr, change: BindingMap) -> relax.Expr:
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks, changed = [], False
    for block in expr.blocks:
        bindings: list[relax.Binding] = []
        block_changed = False
        for old in block.bindings[:]:
            result = change(map_nested(old, partial(_map_expr, change=change)))
            if result is not old:
                block_changed = True
            if isinstance(result, list):
                bindings += result
            else:
                bindings.append(result)
        if block_changed:
            block, changed = type(block)(bindings, block.span), True
        blocks.append(block)
    return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty) if changed else expr


def map_nested(binding: relax.Binding, change: Callable[[relax.Expr], relax.Expr]) -> relax.Binding:
    """The binding with `change` applied to the bodies in it: the branches of an `If`, or a local function's body."""
    value = binding.value
    if isinstance(value, relax.Call):
        return binding
    if isinstance(value, relax.If):
        then, other = change(value.true_branch), change(value.false_branch)
        if not (then.same_as(value.true_branch) and other.same_as(value.false_branch)):
            branches = typed(relax.If(value.cond, then, other, value.span), value.ty)
            return relax.VarBinding(binding.var, branches, binding.span)
    elif isinstance(value, relax.Function):
        body = change(value.body)
        if not body.same_as(value.body):
            return relax.VarBinding(binding.var, with_body(value, body), binding.span)
    return binding


def rebound(binding: relax.Binding, var: relax.Var, value: relax.Expr) -> relax.Binding:
    """A binding of another variable to another value, with the same check if it is a match_cast."""
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(var, value, binding.ty, binding.span)
    return relax.VarBinding(var, value, binding.span)


def calls_pure_op(value: relax.Expr) -> bool:
    """Return whether a value is a call of an op that only computes its result."""
    is_op = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return is_op and bool(value.op.get_attr("FPurity"))


def typed(expr: relax.Expr, ty: tvm.ir.Type) -> relax.Expr:
    """Set the type of `expr`, which must be new: constructors leave SeqExpr and If without one."""
    relax.expr._update_type(expr, ty)
    return expr


def effect(function: str, args: Sequence[relax.Expr] = ()) -> relax.VarBinding:
    """A binding that calls a packed function for its effect."""
    empty = tvm.ir.TupleType([])
    call = relax.Call(relax.ExternFunc(function), list(args), None, [empty], ret_ty=empty)
    return relax.VarBinding(relax.Var("_", empty), call)


def fresh_global_var(base: str, ty: tvm.ir.Type, used: set[str]) -> tvm.ir.GlobalVar:
    """A new global variable named `base`, with a number if that is used; adds its name to `used`."""
    return typed(tvm.ir.GlobalVar(fresh_name(base, used)), ty)


def fresh_name(base: str, used: set[str]) -> str:
    """`base`, with a number if that is used; adds the name to `used`."""
    name, count = base, 0
    while name in used:
        count += 1
        name = f"{base}_{count}"
    used.add(name)
    return name


def is_tensor_constant(expr: relax.Expr) -> bool:
    """Return whether an expression is a constant tensor (and not a string, a type or another literal)."""
    return isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.value, tvm.runtime.Tensor)


def global_vars_in(body: tvm.ir.Expr | tirx.Stmt) -> list[tvm.ir.GlobalVar]:
    """The global variables in a body, in order, each once."""
    return list(dict.fromkeys(nodes(body, tvm.ir.GlobalVar)))


def tensor_types(ty: tvm.ir.Type) -> Iterator[relax.TensorType]:
    """The tensor types inside a type, tuples flattened in order."""
    if isinstance(ty, relax.TensorType):
        yield ty
    elif isinstance(ty, tvm.ir.TupleType):
        for field in ty.fields:
            yield from tensor_types(field)


def vdevice_in(ty: tvm.ir.Type) -> relax.VDevice | None:
    """The device of the first tensor in a type that has one."""
    return next((tensor.vdevice for tensor in tensor_types(ty) if tensor.vdevice is not None), None)


def op_name(value: relax.Expr) -> str | None:
    """The name of the op that `value` calls; None for any other value."""
    return value.op.name if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else None


def integers_of(expr: relax.Expr) -> list[int] | None:
    """The integers of a tuple or a shape; None for other expressions, or if any is symbolic."""
    if not isinstance(expr, (relax.Tuple, relax.ShapeExpr)):
        return None
    values = expr.fields if isinstance(expr, relax.Tuple) else expr.values
    return [int(value) for value in values] if all(isinstance(value, tirx.IntImm) for value in values) else None


def with_vdevice(ty: relax.TensorType, vdevice: relax.VDevice | None) -> relax.TensorType:
    """A tensor type on another device, or without a device."""
    ndim = -1 if ty.shape is not None else int(ty.ndim)
    return relax.TensorType(ty.shape, ty.dtype, vdevice, ndim, ty.span)


def with_args(call: relax.Call, args: Sequence[relax.Expr], **attributes: Any) -> relax.Call:
    """A call of the same op or function with other arguments, and some attributes replaced; it has no type yet."""
    attrs = call.attrs
    if attributes:
        info = type(attrs).__tvm_ffi_type_info__
        values = {field.name: getattr(attrs, field.name) for field in info.fields}
        attrs = tvm.ir.make_node(info.type_key, **{**values, **attributes})
    return relax.Call(call.op, list(args), attrs, call.ty_args, call.span)


def handle(obj: Any) -> int:
    """Identity of a TVM object while it lives, for dictionary keys (``==`` of variables may build an expression)."""
    return int(obj.__chandle__())
