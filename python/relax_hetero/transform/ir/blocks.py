"""Rewriting a function block by block, for passes that look at several bindings at once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from ...op.definition import is_one
from ...tir.core.raw_kernel import in_root_block
from ...tir.core.walks import replaced
from .op_names import IN_PLACE
from .rewriting import (
    calls_pure_op,
    copy_module,
    map_nested,
    op_name,
    rebound,
    relax_functions,
    typed,
    with_body,
    with_functions,
)


class _Variables:
    """Variables of a block."""

    is_dataflow: bool

    def new_var(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        """Make a variable for a binding of the block."""
        return (relax.DataflowVar if self.is_dataflow else relax.Var)(name, ty)


@dataclass
class Block(_Variables):
    """The bindings of one block of a function, and their users."""

    bindings: list[relax.Binding]
    is_dataflow: bool
    # Variables used after the block: in later blocks, or as the result of its sequence.
    used_later: frozenset[relax.Var] = frozenset()

    @cached_property
    def users(self) -> dict[relax.Var, list[int]]:
        """Indices of the bindings that use each variable."""
        users: dict[relax.Var, list[int]] = {}
        for index, binding in enumerate(self.bindings):
            for var in used_vars(binding.value):
                users.setdefault(var, []).append(index)
        return users

    @cached_property
    def definitions(self) -> dict[relax.Var, relax.Expr]:
        """Values of the block's variables, except those of match_casts."""
        return {binding.var: binding.value for binding in self.bindings if isinstance(binding, relax.VarBinding)}

    @cached_property
    def positions(self) -> dict[relax.Var, int]:
        """Index of each variable's binding."""
        return {binding.var: index for index, binding in enumerate(self.bindings)}

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """The value of a variable of this block; any other expression itself."""
        return self.definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def sole_user(self, var: relax.Var) -> int | None:
        """Index of the only binding that uses `var`; None if there are more, or uses after the block."""
        users = self.users.get(var, [])
        return users[0] if len(users) == 1 and self.is_local(var) else None

    def is_local(self, var: relax.Var) -> bool:
        """Return whether nothing after the block uses `var`."""
        return var not in self.used_later and (not self.is_dataflow or isinstance(var, relax.DataflowVar))


Rewrite = Callable[[Block], "list[relax.Binding] | None"]


@dataclass
class Emitter(_Variables):
    """New bindings of a block, each with its type."""

    is_dataflow: bool
    bindings: list[relax.Binding] = field(default_factory=list)

    def emit(self, value: relax.Expr, ty: tvm.ir.Type, name: str) -> relax.Var:
        """Bind `value`, which has no type yet, to a new variable."""
        var = self.new_var(name, ty)
        self.emit_as(var, value)
        return var

    def emit_as(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind `value`, which has no type yet, to a variable that exists already, and has its type."""
        self.bind(var, typed(value, var.ty))

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind `value` to a variable that exists already."""
        self.bindings.append(relax.VarBinding(var, value))

    def reshape(self, x: relax.Expr, shape: Sequence[Any], name: str) -> relax.Var:
        """Reshape `x`."""
        return self.emit(relax.op.reshape(x, list(shape)), tensor_type(shape, str(x.ty.dtype), x.ty), name)

    def permuted(self, x: relax.Expr, axes: Sequence[int], name: str) -> relax.Expr:
        """`x` with its dimensions permuted; `x` itself for the identity."""
        if list(axes) == sorted(axes):
            return x
        shape = shape_of(x) or []
        ty = tensor_type([shape[axis] for axis in axes], str(x.ty.dtype), x.ty)
        return self.emit(relax.op.permute_dims(x, list(axes)), ty, name)

    def cast(self, x: relax.Expr, dtype: str, name: str) -> relax.Expr:
        """`x` cast to a type; `x` itself if it has the type."""
        if str(x.ty.dtype) == dtype:
            return x
        return self.emit(relax.op.astype(x, dtype), tensor_type(shape_of(x) or [], dtype, x.ty), name)


class Spanning(Protocol):
    """A region of bindings that a rewrite replaces at its last binding."""

    @property
    def inside(self) -> Sequence[int]:
        """Indices of the bindings before the last one, which are removed."""


Span = TypeVar("Span", bound=Spanning)


def with_regions(
    block: Block, regions: Mapping[int, Span], write: Callable[[Emitter, Span, relax.Var], None]
) -> list[relax.Binding] | None:
    """The block's bindings with regions rewritten; None if there is no region.

    `regions`: regions by the index of their last binding. `write`: emits a region's new bindings; the last one binds
    the variable that it gets.
    """
    if not regions:
        return None
    removed = {index for region in regions.values() for index in region.inside}
    emitter = Emitter(block.is_dataflow)
    for index, binding in enumerate(block.bindings):
        if index in regions:
            write(emitter, regions[index], binding.var)
        elif index not in removed:
            emitter.bindings.append(binding)
    return emitter.bindings


def with_replaced(
    block: Block, replacements: Mapping[int, list[relax.Binding]], removed: Container[int]
) -> list[relax.Binding] | None:
    """The bindings of a block, some of them replaced and some removed, by index; None if none is replaced."""
    if not replacements:
        return None
    bindings: list[relax.Binding] = []
    for index, binding in enumerate(block.bindings):
        bindings += replacements.get(index, [] if index in removed else [binding])
    return bindings


_WITHOUT_VARS = (tvm.ir.Op, tvm.ir.GlobalVar, tvm.ir.GenericConst, relax.ExternFunc)


def used_vars(expr: relax.Expr) -> list[relax.Var]:
    """The Relax variables that an expression uses, each once, without symbolic sizes."""
    if isinstance(expr, relax.Var):
        return [expr]
    if not isinstance(expr, (relax.Call, relax.Tuple)):
        return list(relax.analysis.free_vars(expr))
    # Slices of TVM's arrays are several times faster than iterators.
    operands = [expr.op, *expr.args[:]] if isinstance(expr, relax.Call) else expr.fields[:]
    used: dict[relax.Var, None] = {}
    for operand in operands:
        if isinstance(operand, relax.Var):
            used[operand] = None
        elif not isinstance(operand, _WITHOUT_VARS):
            used.update(dict.fromkeys(used_vars(operand)))
    return list(used)


def rewrite_blocks(mod: tvm.IRModule, rewrite: Rewrite) -> tvm.IRModule:
    """Apply `rewrite` to every block of every Relax function; it returns new bindings, or None for no change.

    Blocks inside `If` branches and local functions come before the block around them. Returns the same module if
    nothing changes.
    """
    return with_functions(mod, {gv: rewrite_function(func, rewrite) for gv, func in relax_functions(mod)})


def rewrite_function(func: relax.Function, rewrite: Rewrite) -> relax.Function:
    """`rewrite_blocks` for one function."""
    body = _rewrite_sequence(func.body, rewrite)
    return func if body.same_as(func.body) else with_body(func, body)


def _rewrite_sequence(expr: relax.Expr, rewrite: Rewrite) -> relax.Expr:
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    used_later = set(used_vars(expr.body))
    changed = False
    for index, block in reversed(list(enumerate(expr.blocks))):
        old_bindings = block.bindings[:]
        bindings = [map_nested(binding, partial(_rewrite_sequence, rewrite=rewrite)) for binding in old_bindings]
        is_changed = any(new is not old for new, old in zip(bindings, old_bindings, strict=True))
        uses = Block(bindings, isinstance(block, relax.DataflowBlock), frozenset(used_later))
        new_bindings = rewrite(uses)
        if index:
            used_later.update(uses.users)
        if new_bindings is not None or is_changed:
            block = type(block)(bindings if new_bindings is None else new_bindings, block.span)
            changed = True
        blocks.append(block)
    blocks.reverse()
    return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty) if changed else expr


def without_unused(
    bindings: list[relax.Binding], block: Block, is_droppable: Callable[[relax.Expr], bool]
) -> list[Any]:
    """`bindings`, new ones of `block`, without unused ones whose value may be dropped.

    TVM's DeadCodeElimination normalizes the module as it goes, which infers types anew, and drops functions too.
    """
    used: set[relax.Var] = set(block.used_later)
    remaining: list[relax.Binding] = []
    for binding in reversed(bindings):
        var, value = binding.var, binding.value
        if block.is_local(var) and var not in used and isinstance(binding, relax.VarBinding) and is_droppable(value):
            continue
        used.update(used_vars(value))
        remaining.append(binding)
    remaining.reverse()
    return remaining


def shape_of(expr: relax.Expr) -> list[Any] | None:
    """The extents of a tensor, PrimExprs; None if its type lacks them."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return ty.shape.values[:]


def static_form(tensor: relax.Expr) -> tuple[tuple[int, ...], str]:
    """Shape and element type of a tensor whose shape is static."""
    return tuple(int(extent) for extent in shape_of(tensor) or ()), str(tensor.ty.dtype)


def same_extent(a: Any, b: Any) -> bool:
    """Return whether two extents are provably equal."""
    if isinstance(a, tvm.tirx.IntImm) and isinstance(b, tvm.tirx.IntImm):
        return int(a) == int(b)
    return bool(a is b or tvm_ffi.structural_equal(a, b) or tvm.sym.Analyzer().can_prove_equal(a, b))


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Return whether two shapes are provably equal."""
    first, second = list(a), list(b)
    return len(first) == len(second) and all(same_extent(x, y) for x, y in zip(first, second, strict=True))


def tensor_type(shape: Iterable[Any], dtype: str, like: relax.TensorType) -> relax.TensorType:
    """A tensor type on the device of `like`."""
    return relax.TensorType(list(shape), dtype, like.vdevice)


def broadcast(*shapes: Iterable[Any]) -> list[Any] | None:
    """The shape that these shapes broadcast to; None if they do not provably broadcast."""
    lists = [list(shape) for shape in shapes]
    rank = max(map(len, lists), default=0)
    result: list[Any] = [tvm.tirx.IntImm("int64", 1)] * rank
    for shape in lists:
        for axis, extent in enumerate(shape, rank - len(shape)):
            if is_one(result[axis]):
                result[axis] = extent
            elif not is_one(extent) and not same_extent(extent, result[axis]):
                return None
    return result


def renamed(binding: relax.Binding, names: dict[relax.Var, relax.Expr]) -> relax.Binding:
    """The binding with variables in its value replaced; the same object if it uses none of them."""
    value = binding.value
    if not names or not any(var in names for var in used_vars(value)):
        return binding
    if isinstance(value, relax.Call) and all(isinstance(arg, (relax.Var, tvm.ir.GenericConst)) for arg in value.args):
        args = [names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in value.args]
        op = names.get(value.op, value.op) if isinstance(value.op, relax.Var) else value.op
        new = relax.Call(op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
    else:
        new = replaced(value, names)
    return rebound(binding, binding.var, new)


# Splitting a block, so that some bindings are outside of dataflow, with variables that other blocks may use.


def split_block(bindings: list[relax.Binding], cut: set[relax.Var], is_dataflow: bool) -> list[relax.BindingBlock]:
    """Split a block: bindings of the variables `cut` go to plain blocks, the remaining ones to dataflow blocks.

    TVM merges neighbouring blocks of the same kind.
    """
    groups: list[tuple[bool, list[relax.Binding]]] = []
    for binding in bindings:
        inside = binding.var not in cut and (is_dataflow or is_without_effect(binding))
        if not groups or groups[-1][0] != inside:
            groups.append((inside, []))
        groups[-1][1].append(binding)
    return [(relax.DataflowBlock if inside else relax.BindingBlock)(group) for inside, group in groups]


def is_without_effect(binding: relax.Binding) -> bool:
    """Return whether a binding only computes its value, so that it may be in dataflow, and move after its operands.

    A match_cast may not move after the uses of its sizes.
    """
    value = binding.value
    if isinstance(value, (relax.If, relax.Function)) or op_name(value) in IN_PLACE:
        return False
    return not isinstance(value, relax.Call) or calls_pure_op(value)


def with_split_blocks(expr: relax.Expr, cut: set[relax.Var]) -> relax.Expr:
    """A body, or a branch, with the bindings of the variables `cut` in plain blocks."""
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    for block in expr.blocks:
        bindings = [map_nested(binding, partial(with_split_blocks, cut=cut)) for binding in block.bindings]
        if any(binding.var in cut for binding in bindings):
            blocks += split_block(bindings, cut, isinstance(block, relax.DataflowBlock))
        else:
            blocks.append(type(block)(bindings, block.span))
    return typed(relax.SeqExpr(with_shared_variables(blocks), expr.body, expr.span), expr.ty)


def with_shared_variables(blocks: list[relax.BindingBlock]) -> list[relax.BindingBlock]:
    """Blocks whose dataflow variables become plain variables where other blocks use them."""
    home = {binding.var: number for number, block in enumerate(blocks) for binding in block.bindings}
    new: dict[relax.Var, relax.Var] = {}
    for number, block in enumerate(blocks):
        plain = not isinstance(block, relax.DataflowBlock)
        for binding in block.bindings:
            if plain and isinstance(binding.var, relax.DataflowVar):
                new[binding.var] = relax.Var(binding.var.name, binding.var.ty)
            for var in used_vars(binding.value):
                if isinstance(var, relax.DataflowVar) and home.get(var, number) != number:
                    new.setdefault(var, relax.Var(var.name, var.ty))
    if not new:
        return blocks
    return [
        type(block)([rebound(b, new.get(b.var, b.var), replaced(b.value, new)) for b in block.bindings], block.span)
        for block in blocks
    ]


def with_root_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Give kernels without blocks the root block that RewriteDataflowReshape asserts (it crashes otherwise)."""
    functions = dict(mod.functions.items())
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize):
            functions[gv] = func.with_body(in_root_block(func.body, lambda body: body))
    return copy_module(mod, functions)
