"""Rewriting a function block by block: what a pass needs that looks at several bindings at once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm_ffi import structural_map

from ...tir.core.raw_kernel import in_root_block
from .op_names import IN_PLACE
from .rewriting import copy_module, op_name, relax_functions, typed, with_body


@dataclass
class Block:
    """The bindings of one block of a function, and who uses them.

    Attributes
    ----------
    bindings : list of relax.Binding
    is_dataflow : bool
    used_later : frozenset of relax.Var
        Variables used after the block: by later blocks, or as the result of the sequence it stands in.
    users : dict
        From variable to the indices of bindings that use it.
    definitions : dict
        From variable of the block to its value, where that is no match_cast.
    positions : dict
        From variable of the block to the index of its binding.
    """

    bindings: list[relax.Binding]
    is_dataflow: bool
    used_later: frozenset[relax.Var] = frozenset()
    users: dict[relax.Var, list[int]] = field(init=False)
    definitions: dict[relax.Var, relax.Expr] = field(init=False)
    positions: dict[relax.Var, int] = field(init=False)

    def __post_init__(self) -> None:
        self.users, self.definitions, self.positions = {}, {}, {}
        for index, binding in enumerate(self.bindings):
            for var in used_vars(binding.value):
                self.users.setdefault(var, []).append(index)
            self.positions[binding.var] = index
            if isinstance(binding, relax.VarBinding):
                self.definitions[binding.var] = binding.value

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """The value of a variable of this block, `expr` itself if it is none."""
        return self.definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def sole_user(self, var: relax.Var) -> int | None:
        """Index of the only binding that uses `var`, None if there are others, or uses after the block."""
        users = self.users.get(var, [])
        return users[0] if len(users) == 1 and self.is_local(var) else None

    def is_local(self, var: relax.Var) -> bool:
        """Return whether nothing after the block uses `var`."""
        return var not in self.used_later and (not self.is_dataflow or isinstance(var, relax.DataflowVar))


Rewrite = Callable[[Block], "list[relax.Binding] | None"]


@dataclass
class Emitter:
    """New bindings of a block, every one with its type written."""

    is_dataflow: bool
    bindings: list[relax.Binding] = field(default_factory=list)

    def emit(self, value: relax.Expr, ty: tvm.ir.Type, name: str) -> relax.Var:
        """Bind `value`, which has no type yet, to a new variable."""
        value = typed(value, ty)
        var = (relax.DataflowVar if self.is_dataflow else relax.Var)(name, ty)
        self.bind(var, value)
        return var

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind `value` to a variable that exists already."""
        self.bindings.append(relax.VarBinding(var, value))


class Spanning(Protocol):
    """Bindings that become others at the place of the last of them."""

    @property
    def inside(self) -> Sequence[int]:
        """Indices of the bindings before the last one, which vanish."""


Span = TypeVar("Span", bound=Spanning)


def with_regions(
    block: Block, regions: Mapping[int, Span], write: Callable[[Emitter, Span, relax.Var], None]
) -> list[relax.Binding] | None:
    """The block's bindings with regions written anew; None where there is none.

    Parameters
    ----------
    block : Block
    regions : mapping
        Regions by the index of their last binding.
    write : Callable
        Emits what a region becomes; the last binding is of the variable given.
    """
    if not regions:
        return None
    gone = {index for region in regions.values() for index in region.inside}
    emitter = Emitter(block.is_dataflow)
    for index, binding in enumerate(block.bindings):
        if index in regions:
            write(emitter, regions[index], binding.var)
        elif index not in gone:
            emitter.bindings.append(binding)
    return emitter.bindings


def with_replaced(
    block: Block, replacements: Mapping[int, list[relax.Binding]], removed: Container[int]
) -> list[relax.Binding] | None:
    """The bindings of a block, some of them replaced and some left out, by position; None where none is replaced."""
    if not replacements:
        return None
    bindings: list[relax.Binding] = []
    for index, binding in enumerate(block.bindings):
        bindings += replacements.get(index, [] if index in removed else [binding])
    return bindings


def used_vars(expr: relax.Expr) -> list[relax.Var]:
    """The Relax variables an expression uses, each once; those that bind sizes in shapes are not meant."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Call) and all(isinstance(arg, (relax.Var, tvm.ir.GenericConst)) for arg in expr.args):
        operands = [expr.op, *expr.args] if isinstance(expr.op, relax.Var) else list(expr.args)
        return list(dict.fromkeys(arg for arg in operands if isinstance(arg, relax.Var)))
    return list(relax.analysis.free_vars(expr))


def rewrite_blocks(mod: tvm.IRModule, rewrite: Rewrite) -> tvm.IRModule:
    """Every block of every Relax function through `rewrite`, which returns new bindings, or None for no change.

    Blocks inside `If` branches and local functions come before the block around them. The very module is returned if
    nothing changes.
    """
    functions = dict(mod.functions.items())
    changed = False
    for gv, func in relax_functions(mod):
        new = rewrite_function(func, rewrite)
        if new is not func:
            functions[gv], changed = new, True
    return copy_module(mod, functions) if changed else mod


def rewrite_function(func: relax.Function, rewrite: Rewrite) -> relax.Function:
    """As `rewrite_blocks`, of one function."""
    body = _rewrite_sequence(func.body, rewrite)
    return func if body.same_as(func.body) else with_body(func, body)


def _rewrite_sequence(expr: relax.Expr, rewrite: Rewrite) -> relax.Expr:
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    used_later = set(used_vars(expr.body))
    changed = False
    for block in reversed(expr.blocks):
        bindings = [_rewrite_nested(binding, rewrite) for binding in block.bindings]
        is_changed = any(not new.same_as(old) for new, old in zip(bindings, block.bindings, strict=True))
        found = Block(bindings, isinstance(block, relax.DataflowBlock), frozenset(used_later))
        new_bindings = rewrite(found)
        used_later.update(found.users)
        if new_bindings is not None or is_changed:
            block = type(block)(bindings if new_bindings is None else new_bindings, block.span)
            changed = True
        blocks.append(block)
    blocks.reverse()
    return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty) if changed else expr


def _rewrite_nested(binding: relax.Binding, rewrite: Rewrite) -> relax.Binding:
    value = binding.value
    if isinstance(value, relax.If):
        then, other = (_rewrite_sequence(branch, rewrite) for branch in (value.true_branch, value.false_branch))
        if not (then.same_as(value.true_branch) and other.same_as(value.false_branch)):
            branches = typed(relax.If(value.cond, then, other, value.span), value.ty)
            return relax.VarBinding(binding.var, branches, binding.span)
    elif isinstance(value, relax.Function):
        func = rewrite_function(value, rewrite)
        if func is not value:
            return relax.VarBinding(binding.var, func, binding.span)
    return binding


def without_unused(
    bindings: list[relax.Binding], block: Block, is_droppable: Callable[[relax.Expr], bool]
) -> list[Any]:
    """`bindings`, new ones of `block`, less those that nobody uses and whose value may be dropped.

    TVM's DeadCodeElimination normalizes the module as it goes, which infers types anew, and drops functions too.
    """
    used: set[relax.Var] = set(block.used_later)
    kept: list[relax.Binding] = []
    for binding in reversed(bindings):
        var, value = binding.var, binding.value
        if block.is_local(var) and var not in used and isinstance(binding, relax.VarBinding) and is_droppable(value):
            continue
        used.update(used_vars(value))
        kept.append(binding)
    kept.reverse()
    return kept


def shape_of(expr: relax.Expr) -> list[Any] | None:
    """The extents of a tensor, PrimExprs; None where they are not written in its type."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return list(ty.shape.values)


def same_extent(a: Any, b: Any) -> bool:
    """Return whether two extents are provably one."""
    if isinstance(a, tvm.tirx.IntImm) and isinstance(b, tvm.tirx.IntImm):
        return int(a) == int(b)
    return bool(a is b or tvm_ffi.structural_equal(a, b) or tvm.sym.Analyzer().can_prove_equal(a, b))


def is_one(extent: Any) -> bool:
    """Return whether an extent is the number 1."""
    return isinstance(extent, (int, tvm.tirx.IntImm)) and int(extent) == 1


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Return whether two shapes are provably one."""
    first, second = list(a), list(b)
    return len(first) == len(second) and all(same_extent(x, y) for x, y in zip(first, second, strict=True))


def tensor_type(shape: Iterable[Any], dtype: str, like: relax.TensorType) -> relax.TensorType:
    """A tensor type on the device of another one."""
    return relax.TensorType(list(shape), dtype, like.vdevice)


def broadcast(*shapes: Iterable[Any]) -> list[Any] | None:
    """The shape that tensors of these shapes have together, None where they do not provably broadcast."""
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
    """The binding with variables in its value replaced; its very self where it uses none of them."""
    value = binding.value
    if not any(var in names for var in used_vars(value)):
        return binding
    if isinstance(value, relax.Call) and all(isinstance(arg, (relax.Var, tvm.ir.GenericConst)) for arg in value.args):
        args = [names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in value.args]
        op = names.get(value.op, value.op) if isinstance(value.op, relax.Var) else value.op
        new = relax.Call(op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
    else:
        new = structural_map(value, (relax.Var, lambda var: names.get(var, var)))
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(binding.var, new, binding.ty, binding.span)
    return relax.VarBinding(binding.var, new, binding.span)


# A block as several: some bindings outside of dataflow, and the variables that others use then.


def split_block(bindings: list[relax.Binding], cut: set[relax.Var], is_dataflow: bool) -> list[relax.BindingBlock]:
    """Blocks in place of one: what is cut out stands in blocks that are not dataflow, the rest in blocks that are.

    Blocks of one kind that follow each other become one whenever TVM looks at them.
    """
    stretches: list[tuple[bool, list[relax.Binding]]] = []
    for binding in bindings:
        inside = binding.var not in cut and (is_dataflow or _may_be_dataflow(binding))
        if not stretches or stretches[-1][0] != inside:
            stretches.append((inside, []))
        stretches[-1][1].append(binding)
    return [(relax.DataflowBlock if inside else relax.BindingBlock)(part) for inside, part in stretches]


def _may_be_dataflow(binding: relax.Binding) -> bool:
    value = binding.value
    if isinstance(value, (relax.If, relax.Function)) or op_name(value) in IN_PLACE:
        return False
    return not isinstance(value, relax.Call) or (isinstance(value.op, tvm.ir.Op) and bool(value.op.get_attr("FPurity")))


def with_split_blocks(expr: relax.Expr, cut: set[relax.Var]) -> relax.Expr:
    """A body, or a branch, with the bindings of some variables in blocks that are not dataflow."""
    if not isinstance(expr, relax.SeqExpr):
        return expr
    blocks: list[relax.BindingBlock] = []
    for block in expr.blocks:
        bindings = [_with_cuts_inside(binding, cut) for binding in block.bindings]
        if any(binding.var in cut for binding in bindings):
            blocks += split_block(bindings, cut, isinstance(block, relax.DataflowBlock))
        else:
            blocks.append(type(block)(bindings, block.span))
    return typed(relax.SeqExpr(with_shared_variables(blocks), expr.body, expr.span), expr.ty)


def _with_cuts_inside(binding: relax.Binding, cut: set[relax.Var]) -> relax.Binding:
    value = binding.value
    if isinstance(value, relax.If):
        branches = [with_split_blocks(branch, cut) for branch in (value.true_branch, value.false_branch)]
        value = typed(relax.If(value.cond, *branches, value.span), value.ty)
    elif isinstance(value, relax.Function):
        value = with_body(value, with_split_blocks(value.body, cut))
    else:
        return binding
    return relax.VarBinding(binding.var, value, binding.span)


def with_shared_variables(blocks: list[relax.BindingBlock]) -> list[relax.BindingBlock]:
    """Variables of a dataflow block that others use now, as variables that others may use."""
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

    def renamed(binding: relax.Binding) -> relax.Binding:
        value = structural_map(binding.value, (relax.Var, lambda var: new.get(var, var)))
        var = new.get(binding.var, binding.var)
        if isinstance(binding, relax.MatchCast):
            return relax.MatchCast(var, value, binding.ty, binding.span)
        return relax.VarBinding(var, value, binding.span)

    return [type(block)([renamed(binding) for binding in block.bindings], block.span) for block in blocks]


# Root blocks of kernels, which passes of stock TVM assert.


def with_root_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels written without blocks get the root block that RewriteDataflowReshape asserts (it crashes otherwise)."""
    functions = dict(mod.functions.items())
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize):
            functions[gv] = func.with_body(in_root_block(func.body, lambda body: body))
    return copy_module(mod, functions)
