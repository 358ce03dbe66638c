"""Rules for ops whose operand is permuted, which `op.traits` names.

A rule says how the op is done on operands that lie in another order (`transform.ir.axes`): in which order it needs each
operand, with which attributes it is called, and in which order its results then lie. Ops that are not in the table need
their operands as the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...op.traits import ELEMENTWISE, TRAITS
from ..ir.axes import Axes, permuted, reshaped
from ..ir.blocks import shape_of
from ..ir.rewriting import changed, op_name


@dataclass(frozen=True)
class Plan:
    """An op done on permuted operands.

    Attributes
    ----------
    operands : list of (relax.Expr, Axes)
        The tensors it takes and the order each is needed in. One of fewer dimensions than its order broadcasts.
    results : tuple of Axes
        The order in which the result lies, or every field of a tuple.
    build : Callable
        The call, from operands in these orders.
    """

    operands: list[tuple[relax.Expr, Axes]]
    results: tuple[Axes, ...]
    build: Callable[[list[relax.Expr]], relax.Call]


Rule = Callable[[relax.Call, Axes], "Plan | None"]
"""Takes a call and the order in which its data (`data_operands`) lie."""


def plan_for(call: relax.Expr, axes: Axes) -> Plan | None:
    """How `call` is done where its data lie in the order `axes`; None where it cannot be."""
    rule = RULES.get(op_name(call) or "")
    return None if rule is None else rule(call, axes)


def data_operands(call: relax.Expr) -> list[relax.Expr]:
    """The tensors whose order decides that of the whole op: all of full rank, or the first; without a rule none."""
    name = op_name(call) or ""
    if name not in RULES:
        return []
    operands = _tensors(call) if name in ELEMENTWISE or name == "relax.concat" else [call.args[0]]
    ranks = [len(shape_of(operand) or []) for operand in operands]
    return [operand for operand, rank in zip(operands, ranks, strict=True) if rank and rank == max(ranks)]


def order_for(call: relax.Call, preference: Axes) -> Axes | None:
    """The order of its data in which an op makes a result in the order `preference`; None where none is known."""
    data = data_operands(call)
    source, target = (shape_of(data[0]) if data else None), shape_of(call)
    if source is None or target is None:
        return None
    if RULES[op_name(call) or ""] is not _reshape:
        return preference if len(source) == len(preference) else None
    # A reshape undone: the source, made of the target where that lies in the order of the preference.
    undone = reshaped(target, source, preference)
    return undone.result if undone is not None and undone.operand == preference else None


def _tensors(call: relax.Call) -> list[relax.Expr]:
    fields = [field for arg in call.args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return [field for field in fields if isinstance(field.ty, relax.TensorType)]


def _called(call: relax.Call, args: Sequence[relax.Expr], **fields: Any) -> relax.Call:
    attrs = changed(call.attrs, **fields) if fields else call.attrs
    return relax.Call(call.op, list(args), attrs, call.ty_args, call.span)


def _on_data(call: relax.Call, order: Axes, results: tuple[Axes, ...], **fields: Any) -> Plan:
    """The plan that permutes the first operand, keeps the others, and calls with other attributes."""
    return Plan([(call.args[0], order)], results, lambda new: _called(call, [*new, *call.args[1:]], **fields))


def _axes_of(given: Any, rank: int) -> list[int]:
    """An attribute that names axes: a number, several, or None for all."""
    if given is None:
        return list(range(rank))
    axes = [int(given)] if isinstance(given, int) else [int(axis) for axis in given]
    return [axis % rank for axis in axes]


def _leaves_last(dims: Sequence[int], axes: Axes) -> bool:
    """True if an op along `dims`, the innermost among them, would no longer go along what is innermost in memory.

    Kernels go along rows that lie together; a permutation is cheaper than what they would lose.
    """
    last = len(axes) - 1
    return last in dims and last not in [axes[dim] for dim in dims]


def _elementwise(call: relax.Call, axes: Axes) -> Plan:
    def build(new: list[relax.Expr]) -> relax.Call:
        tensors = iter(new)
        return _called(call, [next(tensors) if isinstance(arg.ty, relax.TensorType) else arg for arg in call.args])

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
    """A layout's letters in the order of memory, None for a tiled one, as ``NCHW16c`` is."""
    return "".join(permuted(layout, axes)) if len(layout) == len(axes) and layout.isupper() else None


def _reduction(call: relax.Call, axes: Axes) -> Plan:
    reduced = _axes_of(call.attrs.axis, len(axes))
    moved = sorted(axes[dim] for dim in reduced)
    result = axes if call.attrs.keepdims else _without(axes, reduced)
    return _on_data(call, axes, (result,), axis=moved)


def _without(axes: Axes, gone: Sequence[int]) -> Axes:
    """The order of what is left when dimensions `gone` (of v) go."""
    kept = [axis for dim, axis in enumerate(axes) if dim not in gone]
    ranks = sorted(kept)
    return tuple(ranks.index(axis) for axis in kept)


def _extreme(call: relax.Call, axes: Axes) -> Plan | None:
    if call.attrs.axis is None:
        return None
    dim = int(call.attrs.axis) % len(axes)
    return _on_data(call, axes, (axes if call.attrs.keepdims else _without(axes, [dim]),), axis=axes[dim])


def _along(call: relax.Call, axes: Axes) -> Plan | None:
    """An op along the axis that its attribute names; operands after the first are as they were."""
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
    return _on_data(call, axes, (axes,) * len(call.ty.fields), axis=axis)


def _batch_norm(call: relax.Call, axes: Axes) -> Plan:
    axis = axes[int(call.attrs.axis) % len(axes)]
    return _on_data(call, axes, (axes, *((0,),) * (len(call.ty.fields) - 1)), axis=axis)


def _rows_norm(call: relax.Call, axes: Axes) -> Plan | None:
    dims = _axes_of(call.attrs.axes, len(axes))
    moved = [axes[dim] for dim in dims]
    if moved != sorted(moved) or _leaves_last(dims, axes):
        return None
    return _on_data(call, axes, (axes,), axes=moved)


def _channels_norm(call: relax.Call, axes: Axes) -> Plan | None:
    dims = _axes_of(call.attrs.axes, len(axes))
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
    return Plan([(call.args[0], axes)], (axes,), lambda new: _called(call, [*new, names, *call.args[2:]]))


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
    return Plan([(call.args[0], axes)], (axes,), lambda new: _called(call, [new[0], target]))


def _reshape(call: relax.Call, axes: Axes) -> Plan | None:
    source, target = shape_of(call.args[0]), shape_of(call)
    found = None if source is None or target is None else reshaped(source, target, axes)
    if found is None:
        return None
    shape = found.shape
    return Plan([(call.args[0], found.operand)], (found.result,), lambda new: relax.op.reshape(new[0], shape))


def _quantize(call: relax.Call, axes: Axes) -> Plan:
    return _on_data(call, axes, (axes,), axis=axes[int(call.attrs.axis) % len(axes)])


_RULES: tuple[Rule, ...] = (
    _elementwise, _same, _concat, _pool, _resize, _reduction, _extreme, _along, _along_rows, _take, _split, _batch_norm,
    _rows_norm, _channels_norm, _pad, _strided_slice, _tile, _broadcast_to, _reshape, _quantize,
)  # fmt: skip
BY_NAME = {rule.__name__[1:]: rule for rule in _RULES}
RULES = {op: BY_NAME[traits.permute] for op, traits in TRAITS.items() if traits.permute}
