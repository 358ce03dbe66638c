"""Rules of ops over a mesh: the sharding of the result, given those of operands, and what each device then computes.

A rule takes an `OpCall` and returns an `OpPlan`. Ops without a rule, and calls that a rule does not cover, compute the
whole result on every device from whole operands, which is always right.

Where both a split and the whole are possible, estimates of their times decide (`sharding_costs`).

Weights (values that follow from constants) do not have a sharding of their own: rules choose it, and the compiler cuts
them. A product of a whole operand with a weight splits the weight's columns; if its operand is split along the depth,
it splits the weight's rows, and the result is a sum over devices. In a network of such products, each second one ends
with an all-reduce (Megatron-LM, arXiv:1909.08053), which here follows from the rules of single ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import relax

from ...encoding.block_formats import block_format
from ...op.cached_attention import CACHED_ATTENTION, optional_operands
from ...op.quantized_matmul import DEQUANTIZE_BLOCKS
from ...op.traits import ELEMENTWISE, TRAITS, traits_of
from ..ir.axes import axes_of, dimension_groups, permutation
from ..ir.rewriting import integers_of, with_args
from .sharding import PARTIAL, REPLICATED, Sharding, known

Local = Callable[[Sequence[relax.Expr], int], relax.Expr]
"""Makes what a device computes from its operands, given the number of devices."""


@dataclass(frozen=True)
class Operand:
    """A tensor operand of an op.

    Attributes
    ----------
    expr : relax.Expr
        Value in the program over the mesh.
    shape : list
        Whole shape.
    sharding : Sharding or None
        None for a weight.
    can : callable
        Test of whether the value can be had with a sharding.
    """

    expr: relax.Expr
    shape: list[Any]
    sharding: Sharding | None
    can: Callable[[Sharding], bool]


@dataclass(frozen=True)
class OpCall:
    """A call of an op over a mesh."""

    call: relax.Call
    operands: list[Operand]  # tensor operands in order, those of tuples among them
    count: int  # number of devices
    shapes: list[list[Any]]  # whole shape of each result
    segments: tuple[int, ...]  # segments along the result's last axis that its readers would like; () for any
    # True if a split of the result's last axis serves a reader: a product, attention, or the caller.
    is_read_by_products: bool
    # Test of whether a split of a weight's columns, or output channels, is better than the whole on each device.
    columns_pay: Callable[[Sharding], bool] = lambda _: True
    # Test of whether a split of a weight's rows, given a split operand, is better than a whole operand.
    rows_pay: Callable[[Operand, Sharding], bool] = lambda *_: True

    def first_split(self) -> tuple[int, Sharding] | None:
        """Index and sharding of the first operand that is split."""
        for index, operand in enumerate(self.operands):
            if operand.sharding is not None and operand.sharding.is_split:
                return index, operand.sharding
        return None


@dataclass(frozen=True)
class OpPlan:
    """Plan of an op on all devices."""

    operands: list[Sharding]
    results: list[Sharding]
    local: Local | None = None  # maker of a device's call; None: the same call of its operands
    factor: float = 1.0  # factor of a device's result, such as its share of a mean


def plan_op(op: OpCall) -> OpPlan:
    """The plan of an op."""
    name = op.call.op.name if isinstance(op.call.op, tvm.ir.Op) else ""
    rule = _RULES.get(name) or (_elementwise if name in ELEMENTWISE else None)
    plan = rule(op) if rule is not None else None
    if (
        plan is not None
        and all(operand.can(sharding) for operand, sharding in zip(op.operands, plan.operands, strict=True))
        and all(sharding.divides(shape, op.count) for sharding, shape in zip(plan.results, op.shapes, strict=True))
    ):
        return plan
    return OpPlan([REPLICATED] * len(op.operands), [REPLICATED] * len(op.shapes))


def _elementwise(op: OpCall) -> OpPlan | None:
    states = [operand.sharding for operand in op.operands]
    if op.call.op.name in ("relax.add", "relax.subtract") and all(state == PARTIAL for state in states):
        return OpPlan([PARTIAL, PARTIAL], [PARTIAL])
    shape = op.shapes[0]
    for operand, state in zip(op.operands, states, strict=True):
        if state is None or state.axis is None:
            continue
        axis = state.axis + len(shape) - len(operand.shape)
        if known(shape[axis]) == known(operand.shape[state.axis]) is not None:
            result = state.moved_to(axis)
            return OpPlan([_aligned(result, each.shape, len(shape)) for each in op.operands], [result])
    return None


def _aligned(result: Sharding, shape: Sequence[Any], rank: int) -> Sharding:
    """The sharding of an operand that is broadcast to a result."""
    assert result.axis is not None, "the result is split"
    axis = result.axis - rank + len(shape)
    return REPLICATED if axis < 0 or known(shape[axis]) == 1 else result.moved_to(axis)


def _matmul(op: OpCall) -> OpPlan | None:
    x, w = op.operands
    rank = len(op.shapes[0])
    if len(x.shape) < 2 or len(w.shape) < 2:
        return None
    split = op.first_split()
    if split is None:
        return _columns(op)
    index, state = split
    source = op.operands[index]
    from_end = state.axis - len(source.shape)  # type: ignore[operator]
    if from_end < -2:  # a batch
        result = state.moved_to(from_end + rank)
        operands = [_aligned(result, each.shape, rank) for each in op.operands]
        return OpPlan(operands, [result])
    if (index, from_end) in ((0, -1), (1, -2)):  # along the depth
        operands = [state.moved_to(len(x.shape) - 1), state.moved_to(len(w.shape) - 2)]
        is_possible = all(each.can(sharding) for each, sharding in zip(op.operands, operands, strict=True))
        if not is_possible or (w.sharding is None and not op.rows_pay(source, operands[1])):
            return _columns(op)
        return OpPlan(operands, [PARTIAL])
    result = state.moved_to(rank + from_end)
    return OpPlan([state, REPLICATED] if index == 0 else [REPLICATED, state], [result])


def _columns(op: OpCall) -> OpPlan | None:
    """Split the columns of a weight, if that serves a reader and takes less time."""
    w, rank = op.operands[1], len(op.shapes[0])
    if w.sharding is not None or op.operands[0].sharding is None:
        return None
    columns = Sharding(len(w.shape) - 1, op.segments)
    if not columns.divides(w.shape, op.count) or not w.can(columns):
        return None
    if not op.is_read_by_products or not op.columns_pay(columns):
        return None
    return OpPlan([REPLICATED, columns], [columns.moved_to(rank - 1)])


def _of_split(rule: Callable[[OpCall, Sharding, int], OpPlan | None]) -> Callable[[OpCall], OpPlan | None]:
    """The rule of an op whose result is split if its first operand is, given that operand's sharding and split axis."""

    def checked(op: OpCall) -> OpPlan | None:
        state = op.operands[0].sharding
        return None if state is None or state.axis is None else rule(op, state, state.axis)

    return checked


@_of_split
def _permute(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    return OpPlan([state], [state.moved_to(list(permutation(op.call)).index(axis))])


def reshaped_axis(source: Sequence[Any], target: Sequence[Any], axis: int, count: int) -> int | None:
    """The axis of a reshape's result that is split if `axis` of its operand is; None if no axis is."""
    for source_dims, target_dims in dimension_groups(source, target) or ():
        if source_dims and source_dims[0] == axis and target_dims:
            extent = known(target[target_dims[0]])
            return target_dims[0] if extent is not None and extent % count == 0 else None
    return None


@_of_split
def _reshape(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    operand, shape = op.operands[0], op.shapes[0]
    new_axis = reshaped_axis(operand.shape, shape, axis, op.count)
    if new_axis is None:
        return None
    segments = state.segments
    if segments:
        source, target = int(operand.shape[axis]), int(shape[new_axis])
        if any(size * target % source for size in segments):
            return None
        segments = tuple(size * target // source for size in segments)
    result = Sharding(new_axis, segments)
    if not result.divides(shape, op.count):
        return None
    local = result.local_shape(shape, op.count)
    return OpPlan([state], [result], lambda args, _: relax.op.reshape(args[0], local))


@_of_split
def _broadcast_to(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    operand, shape = op.operands[0], op.shapes[0]
    new_axis = axis + len(shape) - len(operand.shape)
    if known(shape[new_axis]) != known(operand.shape[axis]):
        return None
    result = state.moved_to(new_axis)
    local = result.local_shape(shape, op.count)
    return OpPlan([state], [result], lambda args, _: relax.op.broadcast_to(args[0], local))


@_of_split
def _reduction(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    attrs = op.call.attrs
    axes = axes_of(attrs.axis, len(op.operands[0].shape))
    if axis in axes:
        name = op.call.op.name
        if name == "relax.sum":
            return OpPlan([state], [PARTIAL])
        if name == "relax.mean":
            is_float = "float" in str(op.call.ty.dtype)
            return OpPlan([state], [PARTIAL], factor=1.0 / op.count) if is_float else None
        return None
    removed = 0 if attrs.keepdims else sum(each < axis for each in axes)
    return OpPlan([state], [state.moved_to(axis - removed)])


def _along(*names: str) -> Callable[[OpCall], OpPlan | None]:
    """The rule of an op that combines elements along the axes of some attributes; further operands belong to these."""

    @_of_split
    def rule(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
        rank = len(op.operands[0].shape)
        if any(axis in axes_of(getattr(op.call.attrs, name), rank) for name in names):
            return None
        return OpPlan([state, *[REPLICATED] * (len(op.operands) - 1)], [state] * len(op.shapes))

    return rule


@_of_split
def _pad(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    widths = [int(width) for width in op.call.attrs.pad_width]
    return OpPlan([state], [state]) if not any(widths[2 * axis : 2 * axis + 2]) else None


def _gather_elements(op: OpCall) -> OpPlan | None:
    split = op.first_split()
    if split is None or split[1].axis in axes_of(op.call.attrs.axis, len(op.shapes[0])):
        return None
    axis = split[1].axis
    extents = [known(operand.shape[axis]) for operand in op.operands]  # type: ignore[index]
    return OpPlan([split[1]] * 2, [split[1]]) if extents[0] == extents[1] else None


def _attention(op: OpCall) -> OpPlan | None:
    """Attention of whole batches, and of no others: heads may share keys."""
    split = op.first_split()
    if split is None or split[1].axis != 0 or any(len(operand.shape) != 4 for operand in op.operands):
        return None
    return OpPlan([_aligned(split[1], operand.shape, 4) for operand in op.operands], [split[1]])


@_of_split
def _conv_transpose(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    layout = str(op.call.attrs.data_layout)
    out_layout = str(op.call.attrs.out_layout) or layout
    if not (layout + out_layout).isalpha() or layout[axis] != "N":
        return None
    return OpPlan([state, REPLICATED], [state.moved_to(out_layout.index("N"))])


@_of_split
def _batch_norm(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    if bool(op.call.attrs.training):
        return None
    is_channel = axis == int(op.call.attrs.axis) % len(op.operands[0].shape)
    others = Sharding(0, state.segments) if is_channel else REPLICATED
    return OpPlan([state, *[others] * 4], [state, others, others])


def _conv(op: OpCall) -> OpPlan | None:
    x, w = op.operands
    attrs = op.call.attrs
    layout, kernel = str(attrs.data_layout), str(attrs.kernel_layout)
    out_layout = str(attrs.out_layout) or layout
    if any(not text.isalpha() for text in (layout, kernel, out_layout)):
        return None
    batch, channel = layout.index("N"), layout.index("C")
    outputs, inputs, groups = Sharding(kernel.index("O")), Sharding(kernel.index("I")), int(attrs.groups)
    result = Sharding(out_layout.index("C"))
    state = x.sharding
    if state is None or w.sharding is not None:
        return None
    if state.axis == batch:
        return OpPlan([state, REPLICATED], [state.moved_to(out_layout.index("N"))])
    if groups == 1:
        if state.axis == channel and not state.segments and w.can(inputs) and op.rows_pay(x, inputs):
            return OpPlan([state, inputs], [PARTIAL])
        is_whole = state.axis is None and not state.is_partial
        if is_whole and op.is_read_by_products and w.can(outputs) and op.columns_pay(outputs):
            return OpPlan([REPLICATED, outputs], [result])
        return None
    if state.axis != channel or state.segments or groups % op.count or not w.can(outputs):
        return None
    return OpPlan([state, outputs], [result], lambda args, count: with_args(op.call, args, groups=groups // count))


@_of_split
def _pool(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    layout = str(op.call.attrs.layout)
    if not layout.isalpha() or layout[axis] not in "NC":
        return None
    out_layout = str(getattr(op.call.attrs, "out_layout", "")) or layout
    return OpPlan([state], [state]) if out_layout == layout else None


def _of_sum(op: OpCall) -> OpPlan | None:
    """Take elements of a sum before it is added, if they are fewer."""
    counts = [prod(known(extent) or 0 for extent in shape) for shape in (op.shapes[0], op.operands[0].shape)]
    if op.operands[0].sharding != PARTIAL or not 0 < counts[0] < counts[1]:
        return None
    return OpPlan([PARTIAL, *[REPLICATED] * (len(op.operands) - 1)], [PARTIAL])


def _take(op: OpCall) -> OpPlan | None:
    x, *indices = op.operands  # a number is not among them
    if op.call.attrs.axis is None:
        return None
    if (plan := _of_sum(op)) is not None:
        return plan
    axis = int(op.call.attrs.axis) % len(x.shape)
    if x.sharding is None or x.sharding.axis is None:
        state = indices[0].sharding if indices else None
        if state is None or state.axis is None:
            return None
        return OpPlan([REPLICATED, state], [state.moved_to(axis + state.axis)])
    if x.sharding.axis == axis:
        return None
    rank = len(indices[0].shape) if indices else 0
    shift = rank - 1 if x.sharding.axis > axis else 0
    return OpPlan([x.sharding, *[REPLICATED] * len(indices)], [x.sharding.moved_to(x.sharding.axis + shift)])


def _concat(op: OpCall) -> OpPlan | None:
    split = op.first_split()
    if split is None:
        return None
    state, rank = split[1], len(op.shapes[0])
    axis = int(op.call.attrs.axis or 0) % rank
    if state.axis != axis:
        return OpPlan([state] * len(op.operands), [state])
    operands: list[Sharding] = []
    segments: list[int] = []
    for operand in op.operands:
        own = operand.sharding.segments if operand.sharding is not None and operand.sharding.axis == axis else ()
        operands.append(Sharding(axis, own))
        segments += own or (known(operand.shape[axis]) or 0,)
    return OpPlan(operands, [Sharding(axis, tuple(segments))])


@_of_split
def _split(op: OpCall, state: Sharding, axis: int) -> OpPlan | None:
    if axis != int(op.call.attrs.axis) % len(op.operands[0].shape):
        return OpPlan([state], [state] * len(op.shapes))
    sizes = tuple(known(shape[axis]) or 0 for shape in op.shapes)
    if state.segments != sizes:
        return None
    ends, end = [], 0
    for size in sizes[:-1]:
        end += size // op.count
        ends.append(end)
    return OpPlan([state], [Sharding(axis)] * len(sizes), lambda args, _: relax.op.split(args[0], ends, axis))


def _strided_slice(op: OpCall) -> OpPlan | None:
    state, call, rank = op.operands[0].sharding, op.call, len(op.operands[0].shape)
    if state is None or state.axis is None:
        return _of_sum(op)
    numbers = [integers_of(arg) for arg in call.args[1:]]
    if any(each is None for each in numbers):
        return None
    axes = [axis % rank for axis in numbers[0] or ()]
    if state.axis not in axes:
        return OpPlan([state], [state])
    strides = numbers[3] if len(numbers) > 3 else [1]
    if len(axes) != 1 or strides != [1] or not state.segments:
        return None
    (begin,), (end,) = numbers[1] or (0,), numbers[2] or (0,)
    at, segments = 0, list[int]()
    for size in state.segments:
        if begin <= at and at + size <= end:
            segments.append(size)
        elif at < end and begin < at + size:
            return None
        at += size
    if sum(segments) != end - begin:
        return None

    def of_segments(args: Sequence[relax.Expr], count: int) -> relax.Expr:
        return relax.op.strided_slice(args[0], [state.axis], [begin // count], [end // count])

    return OpPlan([state], [Sharding(state.axis, tuple(segments) if len(segments) > 1 else ())], of_segments)


def columns_axis(call: relax.Call) -> int:
    """Axis of a product's result that is split if its weight's columns, or output channels, are."""
    if traits_of(call.op.name).kind == "conv":
        return (str(call.attrs.out_layout) or str(call.attrs.data_layout)).index("C")
    return len(call.ty.shape.values) - 1


def last_axis_slice(call: relax.Call) -> tuple[int, int] | None:
    """Begin and end of a slice of the last axis; None for other calls."""
    if not isinstance(call.op, tvm.ir.Op) or call.op.name != "relax.strided_slice":
        return None
    shape = call.args[0].ty.shape
    numbers = [integers_of(arg) for arg in call.args[1:]]
    if not isinstance(shape, relax.ShapeExpr) or any(each is None or len(each) != 1 for each in numbers):
        return None
    (axis,), (begin,), (end,) = numbers[0] or (0,), numbers[1] or (0,), numbers[2] or (0,)
    is_plain = len(numbers) < 4 or numbers[3] == [1]
    return (begin, end) if is_plain and axis % len(shape.values) == len(shape.values) - 1 else None


def consecutive(pieces: Mapping[int, int], extent: int | None) -> tuple[int, ...]:
    """Sizes of several pieces, given the end of each by its begin, that make up an axis; () if they do not."""
    begins = sorted(pieces)
    ends = [*begins[1:], extent]
    is_whole = len(begins) > 1 and begins[0] == 0 and all(pieces[a] == b for a, b in zip(begins, ends, strict=True))
    return tuple(pieces[begin] - begin for begin in begins) if is_whole else ()


def _cached_attention(op: OpCall) -> OpPlan | None:
    attrs, count = op.call.attrs, op.count
    heads, kv_heads = int(attrs.heads), int(attrs.kv_heads)
    if heads % count or kv_heads % count or int(attrs.shared_values):
        return None
    size = int(attrs.size)
    split = Sharding(1, (heads * size, kv_heads * size, kv_heads * size))
    operands = [split, Sharding(1), *[REPLICATED] * 3]
    operands += [Sharding(0) if name == "sinks" else REPLICATED for name in optional_operands(attrs)]

    def of_heads(args: Sequence[relax.Expr], count: int) -> relax.Expr:
        return with_args(op.call, args, heads=heads // count, kv_heads=kv_heads // count)

    return OpPlan(operands, [Sharding(1), Sharding(1)], of_heads)


def segments_of_operand(call: relax.Call, shape: Sequence[Any], result: tuple[int, ...]) -> tuple[int, ...]:
    """Segments along the last axis of a call's first operand that serve it, given those that serve its result.

    `shape`: shape of the operand. `result`: segments along the last axis of the result that its readers would like.
    """
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
    if name == CACHED_ATTENTION and not int(call.attrs.shared_values):
        size = int(call.attrs.size)
        return tuple(int(count) * size for count in (call.attrs.heads, call.attrs.kv_heads, call.attrs.kv_heads))
    if name == "relax.split" and int(call.attrs.axis) % len(shape) == len(shape) - 1:
        fields = call.ty.fields if isinstance(call.ty, tvm.ir.TupleType) else [call.ty]  # of one section: a tensor
        return tuple(known(field.shape.values[-1]) or 0 for field in fields)
    if (name in ELEMENTWISE or name in RESHAPES) and sum(result) == known(shape[-1]):
        return result
    return ()


# Weights: a sharding of the result follows from shardings of the operands, which in the end are cut from constants.


def weight_operands(
    call: relax.Call,  # op of the weight
    shapes: Sequence[Sequence[Any]],  # shapes of the operands
    sharding: Sharding,  # sharding of the result, not replicated
    count: int,  # number of devices
) -> tuple[list[Sharding], Local | None] | None:
    """Shardings of a weight's operands that give it a sharding, and what a device computes; None if there are none."""
    name, axis = call.op.name, sharding.axis
    assert axis is not None, "weights are split or whole"
    rank = len(call.ty.shape.values)
    if name == "relax.permute_dims":
        return [sharding.moved_to(list(permutation(call))[axis])], None
    if name == DEQUANTIZE_BLOCKS:
        return _dequantized(call, shapes, sharding, count)
    if name in ELEMENTWISE:
        return [_aligned(sharding, shape, rank) for shape in shapes], None
    if name in RESHAPES and not sharding.segments:
        back = reshaped_axis(call.ty.shape.values, shapes[0], axis, count)
        if back is None or reshaped_axis(shapes[0], call.ty.shape.values, back, count) != axis:
            return None
        local = sharding.local_shape(call.ty.shape.values, count)
        return [Sharding(back)], lambda args, _: relax.op.reshape(args[0], local)
    return None


def _dequantized(
    call: relax.Call, shapes: Sequence[Sequence[Any]], sharding: Sharding, count: int
) -> tuple[list[Sharding], Local | None] | None:
    if sharding.axis == 0:
        return [sharding] * len(shapes), None
    attrs = call.attrs
    depth, block, form = int(attrs.depth), int(attrs.block), str(attrs.format)
    if sharding.segments:
        return None
    if form:
        if depth % (count * block_format(form).superblock_size):
            return None
    elif depth % (count * block):
        return None
    if any(int(shape[1]) % count for shape in shapes):
        return None
    return [Sharding(1)] * len(shapes), lambda args, count: with_args(call, args, depth=depth // count)


REDUCTIONS = tuple(name for name, traits in TRAITS.items() if traits.kind == "reduction")
RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.nn.batch_flatten")
WEIGHT_OPS = ELEMENTWISE | {DEQUANTIZE_BLOCKS, "relax.permute_dims", *RESHAPES}
"""Ops of constants whose results are weights."""

PRODUCTS = frozenset(
    {CACHED_ATTENTION} | {name for name, traits in TRAITS.items() if traits.kind in ("product", "conv", "attention")}
)
_PASSING = frozenset(
    ELEMENTWISE
    | {"relax.permute_dims", "relax.split", "relax.strided_slice", "relax.concat", "relax.nn.batch_norm", *RESHAPES}
    | {name for name, traits in TRAITS.items() if traits.kind in ("softmax", "max_pool", "avg_pool")}
)


def passes_on(call: relax.Call) -> bool:
    """Return whether a split of an operand may become one of the result."""
    return isinstance(call.op, tvm.ir.Op) and call.op.name in _PASSING


_RULES: dict[str, Callable[[OpCall], OpPlan | None]] = {
    "relax.matmul": _matmul,
    "relax.permute_dims": _permute,
    **dict.fromkeys(RESHAPES, _reshape),
    "relax.broadcast_to": _broadcast_to,
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(
        """relax.nn.softmax relax.nn.log_softmax relax.cumsum relax.cumprod relax.sort relax.argsort relax.topk
        relax.flip relax.repeat relax.nn.prelu""".split(),
        _along("axis"),
    ),
    "relax.nn.layer_norm": _along("axes"),
    "relax.nn.rms_norm": _along("axes"),
    "relax.nn.group_norm": _along("axes", "channel_axis"),
    "relax.nn.instance_norm": _along("axes", "channel_axis"),
    **dict.fromkeys(("relax.variance", "relax.std", "relax.argmax", "relax.argmin"), _reduction),
    "relax.nn.batch_norm": _batch_norm,
    **{name: _conv for name, traits in TRAITS.items() if traits.kind == "conv"},
    **{name: _conv_transpose for name, traits in TRAITS.items() if traits.kind == "conv_transpose"},
    **{name: _pool for name, traits in TRAITS.items() if traits.permute in ("pool", "resize")},
    **{name: _attention for name in ("relax.nn.attention", "relax.nn.attention_bias")},
    "relax.nn.pad": _pad,
    "relax.take": _take,
    "relax.gather_elements": _gather_elements,
    "relax.concat": _concat,
    "relax.split": _split,
    "relax.strided_slice": _strided_slice,
    CACHED_ATTENTION: _cached_attention,
}


def has_rule(call: relax.Call) -> bool:
    """Return whether an op may be split by a rule of its own."""
    return isinstance(call.op, tvm.ir.Op) and call.op.name in _RULES
