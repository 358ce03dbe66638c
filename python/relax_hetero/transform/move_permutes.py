"""MovePermutes: permutations move through ops that work in any order of dimensions, and cancel.

Before::

    y = R.permute_dims(conv1, axes=[0, 3, 1, 2])
    z = R.nn.max_pool2d(R.nn.relu(y), [2, 2], layout="NCHW")
    data = R.permute_dims(z, axes=[0, 2, 3, 1])
    conv2 = R.call_tir(cls.conv2d, (data, weight), ...)

After::

    conv2 = R.call_tir(cls.conv2d, (R.nn.max_pool2d(R.nn.relu(conv1), [2, 2], layout="NHWC"), weight), ...)

The pass walks from the first binding to the last. A permutation is not emitted where it stands: its variable is
recorded as its operand read in another order (`PermutedValues`). An op with a rule (`RULES`) then works on an order
that is available, and its result is recorded in the order in which it comes out; two permutations compose, and
nothing is left of those that cancel. An op without a rule, a result of the block and any other user of the program's
order gets the permutation emitted before it, once. Among an op's possible orders the pass takes the one that moves the
fewest bytes: those of operands that are not available in it, and those of the result where its users prefer another one
(`preferences_of`). The walk is repeated while the block's permutations move fewer bytes each time, so that no
program comes out worse or in need of another run.

Assumes a placed module (RealizeVDevice), at any stage before FormDispatches. Every permutation stays on the device of
its operand, but goes with it through a transfer. A second run changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ..op.traits import ELEMENTWISE, TRAITS
from .ir.axes import Axes, axes_of, compose, identity, inverse, is_order_preserving, permutation, permuted, reshaped
from .ir.blocks import Block, Emitter, Rewrite, is_one, renamed, rewrite_function, shape_of, tensor_type, used_vars
from .ir.declare import declare_pass
from .ir.op_names import PERMUTE
from .ir.remarks import record_missed
from .ir.rewriting import op_name, relax_functions, typed, with_args, with_functions

# Values, and the orders in which they are available while permutations move.
#
# Variables that are permutations of one another are one `PermutedValue`. A permutation is emitted where an order is
# first needed that no variable has, and is shared by later users. Where only dimensions of extent 1 move it is a
# reshape, which costs nothing, and a constant is permuted at compile time.

_NOMINAL_EXTENT = 64  # extent that comparisons of bytes assume for a symbolic dimension


@dataclass
class PermutedValue:
    """A tensor in several orders of its dimensions."""

    shape: list[Any]  # shape of the root, the tensor in the order identity; it need not be available
    ty: relax.TensorType  # type of the variable that defined the value: its element type, size and device
    # ``available[axes]`` is ``permute_dims(root, axes)``.
    available: dict[Axes, relax.Expr] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the tensor (`size_of`)."""
        return size_of(self.ty)

    def source(self, key: Axes) -> tuple[relax.Expr, Axes, bool]:
        """Source of an order: a tensor, its permutation to that order, and whether that moves no element."""
        sources: list[tuple[relax.Expr, Axes, bool]] = []
        for order, expr in self.available.items():
            axes = compose(inverse(order), key)
            sources.append((expr, axes, is_order_preserving([self.shape[axis] for axis in order], axes)))
        return next((source for source in sources if source[2]), sources[0])


class PermutedValues:
    """The tensors of one block, by variable. `emitter`: receives the permutations."""

    def __init__(self, block: Block, emitter: Emitter) -> None:
        self.block, self.emitter = block, emitter
        self._values: dict[relax.Var, tuple[PermutedValue, Axes]] = {}
        self._constants: dict[tuple[int, str], PermutedValue] = {}
        self._wide: dict[tuple[relax.Var, int], relax.Expr] = {}

    def find(self, expr: relax.Expr) -> tuple[PermutedValue, Axes] | None:
        """Value and order of a tensor; None for a tensor of unknown shape and other expressions."""
        if isinstance(expr, relax.Var) and expr in self._values:
            return self._values[expr]
        shape = shape_of(expr)
        if shape is None or expr.ty.dtype is None:
            return None
        if isinstance(expr, tvm.ir.GenericConst):
            key = hash(expr.value), str(expr.ty)  # by identity: the table keeps the tensor alive
            value = self._constants.setdefault(key, PermutedValue(shape, expr.ty, {identity(len(shape)): expr}))
            return value, identity(len(shape))
        if not isinstance(expr, relax.Var):
            return None
        return self.define(expr, PermutedValue(shape, expr.ty, {identity(len(shape)): expr}), identity(len(shape)))

    def define(self, var: relax.Var, value: PermutedValue, axes: Axes) -> tuple[PermutedValue, Axes]:
        """Define `var` as `value` in the order `axes`; emit it at once if it is used after the block."""
        self._values[var] = value, axes
        if not self.block.is_local(var) and not self._is_emitted(var, value):
            self._emit_as(var, value, axes)
        return value, axes

    def _is_emitted(self, var: relax.Var, value: PermutedValue) -> bool:
        return any(isinstance(expr, relax.Var) and expr.same_as(var) for expr in value.available.values())

    def _emit_as(self, var: relax.Var, value: PermutedValue, axes: Axes) -> None:
        if axes in value.available:
            self.emitter.bind(var, value.available[axes])
        else:
            self._emit_order(value, axes, var)

    def orders(self, expr: relax.Expr) -> list[Axes]:
        """The orders in which a tensor is available."""
        match = self.find(expr)
        return [] if match is None else [compose(inverse(order), match[1]) for order in match[0].available]

    def cost(self, expr: relax.Expr, axes: Axes) -> int:
        """Bytes to move for a tensor in the order `axes`, to which it broadcasts if it has fewer dimensions."""
        match = self.find(expr)
        if match is None or isinstance(expr, tvm.ir.GenericConst):
            return 0
        value, order = match
        if len(order) < len(axes):
            shape = _widened([value.shape[axis] for axis in order], len(axes))
            return 0 if is_order_preserving(shape, inverse(axes)) else value.size
        key = compose(order, inverse(axes))
        return 0 if key in value.available or value.source(key)[2] else value.size

    def in_order(self, expr: relax.Expr, axes: Axes | None = None) -> relax.Expr:
        """A tensor in an order (default: that of the program); emits the permutation unless it is available."""
        match = self.find(expr)
        if match is None:
            return expr
        value, order = match
        axes = identity(len(order)) if axes is None else axes
        if len(order) < len(axes):
            return self._widened_at(expr, axes)
        key = compose(order, inverse(axes))
        if key not in value.available:
            self._emit_order(value, key, expr if isinstance(expr, relax.Var) and key == order else None)
        return value.available[key]

    def _emit_order(self, value: PermutedValue, key: Axes, var: relax.Var | None) -> None:
        source, axes, is_free = value.source(key)
        shape = [value.shape[axis] for axis in key]
        if isinstance(source, tvm.ir.GenericConst):
            array = source.value.numpy().transpose(axes).copy()
            permuted_value: relax.Expr = tvm.ir.GenericConst(
                tvm.runtime.tensor(array), tensor_type(shape, _dtype(value), value.ty)
            )
            if var is not None:
                self.emitter.bind(var, permuted_value)
        else:
            call = relax.op.reshape(source, shape) if is_free else relax.op.permute_dims(source, list(axes))
            ty = tensor_type(shape, _dtype(value), value.ty)
            if var is None:
                permuted_value = self.emitter.emit(call, ty, f"{source.name.removesuffix('_permuted')}_permuted")
            else:
                self.emitter.bind(var, typed(call, ty))
                permuted_value = var
        value.available[key] = permuted_value

    def _widened_at(self, expr: relax.Expr, axes: Axes) -> relax.Expr:
        plain = self.in_order(expr)
        shape = shape_of(plain) or []
        if all(is_one(extent) for extent in shape):
            return plain
        wide = _widened(shape, len(axes))
        ty = tensor_type(wide, str(plain.ty.dtype), plain.ty)
        if isinstance(plain, tvm.ir.GenericConst):
            array = plain.value.numpy().reshape([int(extent) for extent in wide])
            return self.in_order(tvm.ir.GenericConst(tvm.runtime.tensor(array), ty), axes)
        key = (plain, len(axes))
        if key not in self._wide:
            self._wide[key] = self.emitter.emit(relax.op.reshape(plain, wide), ty, f"{plain.name}_wide")
        return self.in_order(self._wide[key], axes)


def size_of(ty: relax.TensorType) -> int:
    """Bytes of a tensor; a nominal number where extents are symbolic or unknown."""
    if ty.dtype is None or not isinstance(ty.shape, relax.ShapeExpr):
        return _NOMINAL_EXTENT
    extents = [int(dim) if isinstance(dim, tirx.IntImm) else _NOMINAL_EXTENT for dim in ty.shape.values]
    return math.prod(extents) * max(1, (int(ty.dtype.dtype.bits) + 7) // 8)


def _widened(shape: list[Any], rank: int) -> list[Any]:
    return [tirx.IntImm("int64", 1)] * (rank - len(shape)) + shape


def _dtype(value: PermutedValue) -> str:
    return str(value.ty.dtype)


# Rules for ops whose operand is permuted, which `op.traits` names.
#
# A rule describes the op on operands in another order (`transform.ir.axes`): the order in which it needs each operand,
# the attributes of its call, and the order in which its results come out. Ops that are not in the table need their
# operands in the program's order.


@dataclass(frozen=True)
class Plan:
    """An op on permuted operands."""

    # The tensors it takes and the order that it needs of each. A tensor with fewer dimensions broadcasts.
    operands: list[tuple[relax.Expr, Axes]]
    results: tuple[Axes, ...]  # the order of the result, or of each field of a tuple
    build: Callable[[list[relax.Expr]], relax.Call]  # makes the call from operands in these orders


Rule = Callable[[relax.Call, Axes], "Plan | None"]  # takes a call and the order of its data (`data_operands`)


def plan_for(call: relax.Expr, axes: Axes) -> Plan | None:
    """Plan of `call` for data in the order `axes`; None if there is none."""
    rule = RULES.get(op_name(call) or "")
    return None if rule is None else rule(call, axes)


def data_operands(call: relax.Expr) -> list[relax.Expr]:
    """The tensors whose order decides that of the op: all of full rank, or the first; none without a rule."""
    name = op_name(call) or ""
    if name not in RULES:
        return []
    operands = _tensors(call) if name in ELEMENTWISE or name == "relax.concat" else [call.args[0]]
    ranks = [len(shape_of(operand) or []) for operand in operands]
    return [operand for operand, rank in zip(operands, ranks, strict=True) if rank and rank == max(ranks)]


def order_for(call: relax.Call, preference: Axes) -> Axes | None:
    """The order of its data in which an op makes a result in the order `preference`; None if none is known."""
    data = data_operands(call)
    source, target = (shape_of(data[0]) if data else None), shape_of(call)
    if source is None or target is None:
        return None
    if RULES[op_name(call) or ""] is not _reshape:
        return preference if len(source) == len(preference) else None
    # The inverse reshape, from the target in the preferred order to the source.
    undone = reshaped(target, source, preference)
    return undone.result if undone is not None and undone.operand == preference else None


def _tensors(call: relax.Call) -> list[relax.Expr]:
    fields = [field for arg in call.args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return [field for field in fields if isinstance(field.ty, relax.TensorType)]


def _on_data(call: relax.Call, order: Axes, results: tuple[Axes, ...], **fields: Any) -> Plan:
    """The plan that permutes the first operand, keeps the remaining ones, and replaces attributes."""
    return Plan([(call.args[0], order)], results, lambda new: with_args(call, [*new, *call.args[1:]], **fields))


def _leaves_last(dims: Sequence[int], axes: Axes) -> bool:
    """Return whether an op along `dims`, the innermost among them, would no longer read contiguous rows of memory.

    Kernels are made for contiguous rows; a permutation is cheaper than the speed that they would lose.
    """
    last = len(axes) - 1
    return last in dims and last not in [axes[dim] for dim in dims]


def _elementwise(call: relax.Call, axes: Axes) -> Plan:
    def build(new: list[relax.Expr]) -> relax.Call:
        tensors = iter(new)
        return with_args(call, [next(tensors) if isinstance(arg.ty, relax.TensorType) else arg for arg in call.args])

    return Plan([(tensor, axes) for tensor in _tensors(call)], (axes,), build)


def _same(call: relax.Call, axes: Axes) -> Plan:
    fields = len(call.ty.fields) if isinstance(call.ty, tvm.ir.TupleType) else 1
    return _on_data(call, axes, (axes,) * fields)


def _concat(call: relax.Call, axes: Axes) -> Plan | None:
    if not isinstance(call.args[0], relax.Tuple) or call.attrs.axis is None:
        return None
    axis = axes[int(call.attrs.axis) % len(axes)]
    operands = [(field, axes) for field in call.args[0].fields]
    return Plan(operands, (axes,), lambda new: relax.op.concat(new, axis))


def _pool(call: relax.Call, axes: Axes) -> Plan | None:
    layout = _layout(str(call.attrs.layout), axes)
    if layout is None or call.attrs.out_layout != call.attrs.layout:
        return None
    return _on_data(call, axes, (axes,), layout=layout, out_layout=layout)


def _resize(call: relax.Call, axes: Axes) -> Plan | None:
    layout = _layout(str(call.attrs.layout), axes)
    if layout not in ("NCHW", "NHWC", "NCDHW", "NDHWC"):
        return None
    return _on_data(call, axes, (axes,), layout=layout)


def _layout(layout: str, axes: Axes) -> str | None:
    """A layout's letters in the order of memory; None for a tiled one, such as ``NCHW16c``."""
    return "".join(permuted(layout, axes)) if len(layout) == len(axes) and layout.isupper() else None


def _reduction(call: relax.Call, axes: Axes) -> Plan:
    reduced = axes_of(call.attrs.axis, len(axes))
    moved = sorted(axes[dim] for dim in reduced)
    result = axes if call.attrs.keepdims else _without(axes, reduced)
    return _on_data(call, axes, (result,), axis=moved)


def _without(axes: Axes, dims: Sequence[int]) -> Axes:
    """The order of the remaining dimensions when dimensions `dims` (of v) are removed."""
    remaining = [axis for dim, axis in enumerate(axes) if dim not in dims]
    ranks = sorted(remaining)
    return tuple(ranks.index(axis) for axis in remaining)


def _extreme(call: relax.Call, axes: Axes) -> Plan | None:
    if call.attrs.axis is None:
        return None
    dim = int(call.attrs.axis) % len(axes)
    return _on_data(call, axes, (axes if call.attrs.keepdims else _without(axes, [dim]),), axis=axes[dim])


def _along(call: relax.Call, axes: Axes) -> Plan | None:
    """An op along the axis that its attribute names; operands after the first are unchanged."""
    if call.attrs.axis is None:
        return None
    return _on_data(call, axes, (axes,), axis=axes[int(call.attrs.axis) % len(axes)])


def _along_rows(call: relax.Call, axes: Axes) -> Plan | None:
    return None if _leaves_last([int(call.attrs.axis) % len(axes)], axes) else _along(call, axes)


def _take(call: relax.Call, axes: Axes) -> Plan | None:
    index = shape_of(call.args[1])
    return _along(call, axes) if index is not None and len(index) == 1 else None


def _split(call: relax.Call, axes: Axes) -> Plan:
    axis = axes[int(call.attrs.axis) % len(axes)]
    count = len(call.ty.fields) if isinstance(call.ty, tvm.ir.TupleType) else 1  # of one section: a tensor
    return _on_data(call, axes, (axes,) * count, axis=axis)


def _batch_norm(call: relax.Call, axes: Axes) -> Plan:
    axis = axes[int(call.attrs.axis) % len(axes)]
    return _on_data(call, axes, (axes, *((0,),) * (len(call.ty.fields) - 1)), axis=axis)


def _rows_norm(call: relax.Call, axes: Axes) -> Plan | None:
    dims = axes_of(call.attrs.axes, len(axes))
    moved = [axes[dim] for dim in dims]
    if moved != sorted(moved) or _leaves_last(dims, axes):
        return None
    return _on_data(call, axes, (axes,), axes=moved)


def _channels_norm(call: relax.Call, axes: Axes) -> Plan | None:
    dims = axes_of(call.attrs.axes, len(axes))
    channel = axes[int(call.attrs.channel_axis) % len(axes)]
    return _on_data(call, axes, (axes,), channel_axis=channel, axes=sorted(axes[dim] for dim in dims))


def _pad(call: relax.Call, axes: Axes) -> Plan:
    widths = [int(width) for width in call.attrs.pad_width]
    pairs = permuted([widths[2 * dim : 2 * dim + 2] for dim in range(len(axes))], axes)
    return _on_data(call, axes, (axes,), pad_width=[width for pair in pairs for width in pair])


def _strided_slice(call: relax.Call, axes: Axes) -> Plan | None:
    if not isinstance(call.args[1], relax.Tuple):
        return None
    moved = [axes[int(dim) % len(axes)] for dim in call.args[1].fields]
    names = relax.Tuple([relax.prim_value(axis) for axis in moved])
    return Plan([(call.args[0], axes)], (axes,), lambda new: with_args(call, [*new, names, *call.args[2:]]))


def _tile(call: relax.Call, axes: Axes) -> Plan | None:
    repeats = [int(count) for count in call.attrs.repeats]
    if len(repeats) > len(axes):
        return None
    repeats = [1] * (len(axes) - len(repeats)) + repeats
    return _on_data(call, axes, (axes,), repeats=permuted(repeats, axes))


def _broadcast_to(call: relax.Call, axes: Axes) -> Plan | None:
    shape = shape_of(call)
    if shape is None or len(shape) != len(axes):
        return None
    target = relax.ShapeExpr(permuted(shape, axes))
    return Plan([(call.args[0], axes)], (axes,), lambda new: with_args(call, [new[0], target]))


def _reshape(call: relax.Call, axes: Axes) -> Plan | None:
    source, target = shape_of(call.args[0]), shape_of(call)
    plan = None if source is None or target is None else reshaped(source, target, axes)
    if plan is None:
        return None
    shape = plan.shape
    return Plan([(call.args[0], plan.operand)], (plan.result,), lambda new: relax.op.reshape(new[0], shape))


def _quantize(call: relax.Call, axes: Axes) -> Plan:
    return _on_data(call, axes, (axes,), axis=axes[int(call.attrs.axis) % len(axes)])


_RULES: tuple[Rule, ...] = (
    _elementwise, _same, _concat, _pool, _resize, _reduction, _extreme, _along, _along_rows, _take, _split, _batch_norm,
    _rows_norm, _channels_norm, _pad, _strided_slice, _tile, _broadcast_to, _reshape, _quantize,
)  # fmt: skip
BY_NAME = {rule.__name__[1:]: rule for rule in _RULES}
RULES = {op: BY_NAME[traits.permute] for op, traits in TRAITS.items() if traits.permute}


# Orders in which the users of a value prefer it, which decide between plans of the same cost so far.


def preferences_of(block: Block) -> dict[relax.Var, Axes]:
    """For each variable the order that most of its users prefer, computed from the last binding to the first.

    A permutation prefers its own result's preferred order, permuted back; an op with a rule prefers that of its
    result; every other op, and use after the block, prefers the program's order. Of two orders with as many votes the
    permuted one wins.
    """
    preferences: dict[relax.Var, Axes] = {}
    for binding in reversed(block.bindings):
        votes: Counter[Axes] = Counter()
        shape = shape_of(binding.var)
        if shape is None:
            continue
        plain = identity(len(shape))
        if not block.is_local(binding.var):
            votes[plain] += 1
        for index in block.users.get(binding.var, []):
            user = block.bindings[index]
            if binding.var in used_vars(user.value):
                vote = _vote(binding.var, user, preferences, plain)
                if vote is not None:
                    votes[vote] += 1
        if votes:
            preferences[binding.var] = max(votes, key=lambda axes: (votes[axes], axes != plain))
    return preferences


def _vote(var: relax.Var, user: relax.Binding, preferences: dict[relax.Var, Axes], plain: Axes) -> Axes | None:
    call = user.value
    if op_name(call) == PERMUTE:
        axes = tuple(permutation(call))
        return compose(preferences.get(user.var, plain), inverse(axes))
    if isinstance(call, relax.Var):
        return preferences.get(user.var, plain)
    if not any(isinstance(operand, relax.Var) and operand.same_as(var) for operand in data_operands(call)):
        return plain
    preference = preferences.get(user.var)
    order = None if preference is None or isinstance(call.ty, tvm.ir.TupleType) else order_for(call, preference)
    plan = None if order is None else plan_for(call, order)
    return order if plan is not None and plan.results[0] == preference and plan.operands[0][1] == order else None


def move_permutes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; returns the same module where nothing changes."""
    functions = relax_functions(mod)
    return with_functions(mod, {gv: rewrite_function(func, _in_function(gv.name_hint)) for gv, func in functions})


MovePermutes = declare_pass("MovePermutes", move_permutes)


def _in_function(name: str) -> Rewrite:
    return lambda block: _rewrite(block, name)


def _rewrite(block: Block, function: str) -> list[relax.Binding] | None:
    best, min_moved = None, _moved(block.bindings)
    while min_moved:
        mover = _Mover(block, function)
        for binding in block.bindings:
            mover.visit(binding)
        moved = _moved(mover.emitter.bindings)
        if moved >= min_moved:
            mover.report()
            break
        best, min_moved = mover.emitter.bindings, moved
        block = Block(best, block.is_dataflow, block.used_later)
    return best


def _moved(bindings: list[relax.Binding]) -> int:
    """Bytes that the permutations among `bindings` move; at least one each."""
    values = [binding.value for binding in bindings if op_name(binding.value) == PERMUTE]
    return sum(max(1, size_of(value.ty)) for value in values)


class _Mover:
    """The walk over one block."""

    def __init__(self, block: Block, function: str) -> None:
        self.block, self.function = block, function
        self.emitter = Emitter(block.is_dataflow)
        self.values = PermutedValues(block, self.emitter)
        self.preferences = preferences_of(block)
        self.missed: list[tuple[str, str, str]] = []
        self.tuples: dict[relax.Var, tuple[relax.Var, tuple[Axes, ...]]] = {}

    def visit(self, binding: relax.Binding) -> None:
        """Rewrite one binding."""
        var, value = binding.var, _simple(binding.value)
        match = self.values.find(value) if isinstance(value, relax.Var) else None
        if isinstance(binding, relax.VarBinding) and match is not None:
            self.values.define(var, *match)
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.tuples:
            self._take_field(var, value)
        elif op_name(value) == PERMUTE and (operand := self.values.find(value.args[0])) is not None:
            self.values.define(var, operand[0], compose(operand[1], tuple(permutation(value))))
        else:
            plan = self._best(binding, value) if isinstance(value, relax.Call) else None
            if plan is None:
                self._keep(binding)
            else:
                self._move(var, plan)

    def _best(self, binding: relax.Binding, call: relax.Call) -> Plan | None:
        """The cheapest plan of an op; None for the program's own order."""
        data = data_operands(call)
        if not data or not all(self.values.find(operand) for operand in data):
            return None
        plain = identity(len(shape_of(data[0]) or []))
        available = list(dict.fromkeys(axes for operand in data for axes in self.values.orders(operand)))
        preference = self.preferences.get(binding.var)
        preferred = None if preference is None else order_for(call, preference)
        orders = available if preferred is None else [*available, preferred]
        is_lazy = any(plain not in self.values.orders(operand) for operand in data)
        cost = sum(self.values.cost(operand, plain) for operand in data) + self._cost_after(binding.var, None)
        best: tuple[int, int, Plan | None] = (cost, 1, None)
        for axes in orders:
            plan = plan_for(call, axes) if axes != plain else None
            if plan is None or not self._is_possible(binding.var, plan):
                continue
            cost = sum(self.values.cost(*operand) for operand in plan.operands)
            cost += self._cost_after(binding.var, plan.results[0])
            # At equal cost a permuted value stays permuted: later ops may be cheaper that way.
            candidate = (cost, 0 if is_lazy and axes in available else 2, plan)
            best = min(best, candidate, key=lambda choice: choice[:2])
        return best[2]

    def _cost_after(self, var: relax.Var, axes: Axes | None) -> int:
        """Bytes that users of `var` have to move if it is in the order `axes` (None: the program's)."""
        shape, preference = shape_of(var), self.preferences.get(var)
        if shape is None or preference is None:
            return 0
        axes = identity(len(shape)) if axes is None else axes
        moved = compose(axes, inverse(preference))
        return 0 if is_order_preserving(permuted(shape, axes), moved) else size_of(var.ty)

    def _is_possible(self, var: relax.Var, plan: Plan) -> bool:
        """Return whether the types of the results are known, and a tuple is used by its fields only."""
        if not isinstance(var.ty, tvm.ir.TupleType):
            return shape_of(var) is not None
        users = [self.block.bindings[index].value for index in self.block.users.get(var, [])]
        fields_known = all(isinstance(field, relax.TensorType) and field.shape is not None for field in var.ty.fields)
        return fields_known and self.block.is_local(var) and all(isinstance(user, relax.TupleGetItem) for user in users)

    def _keep(self, binding: relax.Binding) -> None:
        name = op_name(binding.value)
        if name is not None:
            self._add_missed(binding, name)
        names = {var: self.values.in_order(var) for var in used_vars(binding.value)}
        names = {var: value for var, value in names.items() if not value.same_as(var)}
        self.emitter.bindings.append(renamed(binding, names))

    def _add_missed(self, binding: relax.Binding, op: str) -> None:
        """Record that an op needs a permutation of an operand."""
        for operand in used_vars(binding.value):
            shape = shape_of(operand)
            size = 0 if shape is None else self.values.cost(operand, identity(len(shape)))
            if size:
                order = "in this order only" if data_operands(binding.value) else "in the order of its dimensions"
                reason = f"takes {operand.name} {order}: {size} bytes are permuted for it"
                self.missed.append((binding.var.name, op.removeprefix("relax."), reason))

    def report(self) -> None:
        """Emit the missed-optimization remarks; to be called when nothing moves any more."""
        for variable, op, reason in self.missed:
            record_missed(self.function, variable, op, reason)

    def _move(self, var: relax.Var, plan: Plan) -> None:
        call = plan.build([self.values.in_order(operand, axes) for operand, axes in plan.operands])
        if isinstance(var.ty, tvm.ir.TupleType):
            fields = [_permuted_type(ty, axes) for ty, axes in zip(var.ty.fields, plan.results, strict=True)]
            result = self.emitter.emit(call, tvm.ir.TupleType(fields), var.name)
            self.tuples[var] = result, plan.results
            return
        axes = plan.results[0]
        ty = _permuted_type(var.ty, axes)
        if axes == identity(len(axes)):
            self.emitter.bind(var, typed(call, ty))
            return
        result = self.emitter.emit(call, ty, var.name)
        self._define(var, result, axes)

    def _take_field(self, var: relax.Var, item: relax.TupleGetItem) -> None:
        result, orders = self.tuples[item.tuple_value]
        axes = orders[item.index]
        field = self.block.new_var(var.name, _permuted_type(var.ty, axes))
        self.emitter.bind(field, relax.TupleGetItem(result, item.index))
        self._define(var, field, axes)

    def _define(self, var: relax.Var, value: relax.Var, axes: Axes) -> None:
        self.values.define(var, PermutedValue(shape_of(value) or [], value.ty, {identity(len(axes)): value}), axes)


def _simple(value: relax.Expr) -> relax.Expr:
    """``(a, b)[0]`` as ``a``, any other value as it is."""
    if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
        return value.tuple_value.fields[value.index]
    return value


def _permuted_type(ty: relax.TensorType, axes: Axes) -> relax.TensorType:
    return tensor_type(permuted(list(ty.shape.values), axes), str(ty.dtype), ty)
