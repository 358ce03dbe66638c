"""Views of an attention's operands and result through permutations, reshapes, slices and casts.

A `HeadsTrace` maps each dimension of a tensor to iteration dimensions. `traced` goes from an operand back to its
earliest source, as long as each op only moves, scales or rounds elements; `followed` goes forward from the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx

from ...encoding.heads import HeadsMap
from ...target.element_types import HALF_TYPES
from ..ir.axes import permutation
from ..ir.blocks import Block, is_one, same_extent, shape_of
from ..ir.op_names import CAST, PERMUTE, RESHAPE
from ..ir.relax_expressions import scalar_of
from ..ir.rewriting import integers_of, op_name

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class HeadsTrace:
    """A tensor and the positions of the heads in it."""

    value: relax.Expr
    # See `HeadsMap`.
    dims: Dims
    starts: tuple[int, ...]
    factor: float = 1.0  # factor that its elements are multiplied by

    @staticmethod
    def of(value: relax.Expr, dims: Sequence[Sequence[str]]) -> HeadsTrace:
        """The trace of a complete tensor."""
        return HeadsTrace(value, tuple(map(tuple, dims)), (0,) * len(dims))

    @property
    def map(self) -> HeadsMap:
        """Positions of the heads."""
        return HeadsMap(self.dims, self.starts)

    @property
    def innermost(self) -> str:
        """The iteration dimension of neighbours in memory; "" without one."""
        return self.dims[-1][-1] if self.dims and self.dims[-1] else ""


def traced(block: Block, view: HeadsTrace, sizes: Mapping[str, Any], innermost: tuple[str, ...]) -> HeadsTrace:
    """The earliest source with the view's elements, in any order; its innermost dimension should be in `innermost`.

    All names in `innermost` are equally good. Elements that are scaled between two casts are scaled without the casts.
    """
    best, dtype = view, str(view.value.ty.dtype)
    while True:
        source = _source(block, view, sizes)
        if source is None:
            return best
        view = source
        is_good = view.innermost in innermost or best.innermost not in innermost
        if is_good and str(view.value.ty.dtype) == dtype:
            best = view


def _source(block: Block, view: HeadsTrace, sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The view of the operand of the op that computes a value; None if the op does more than move or scale elements."""
    call = block.definition(view.value)
    if isinstance(call, relax.TupleGetItem):
        return _split(block, view, call)
    trace_back = _TRACE_BACK.get(op_name(call) or "")
    return None if trace_back is None or shape_of(call.args[0]) is None else trace_back(view, call, sizes)


def _permuted(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace:
    order = permutation(call)
    dims: list[tuple[str, ...]] = [()] * len(order)
    starts = [0] * len(order)
    for position, axis in enumerate(order):
        dims[axis], starts[axis] = view.dims[position], view.starts[position]
    return replace(view, value=call.args[0], dims=tuple(dims), starts=tuple(starts))


def _reshaped(view: HeadsTrace, call: relax.Call, sizes: Mapping[str, Any]) -> HeadsTrace | None:
    if any(view.starts):
        return None
    dims = regrouped(view.dims, shape_of(call.args[0]) or [], sizes)
    return None if dims is None else replace(HeadsTrace.of(call.args[0], dims), factor=view.factor)


def _expanded(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The operand of expand_dims: without the new dimensions."""
    rank = len(view.dims)
    new = {int(axis) % rank for axis in call.attrs.axis}
    if any(view.dims[axis] or view.starts[axis] for axis in new):
        return None
    axes = [axis for axis in range(rank) if axis not in new]
    dims, starts = tuple(view.dims[axis] for axis in axes), tuple(view.starts[axis] for axis in axes)
    return replace(view, value=call.args[0], dims=dims, starts=starts)


def _squeezed(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace:
    """The operand of squeeze: with the removed dimensions."""
    shape = shape_of(call.args[0]) or []
    axes = call.attrs.axis
    removed = (
        {axis for axis, extent in enumerate(shape) if is_one(extent)}
        if axes is None
        else {int(axis) % len(shape) for axis in axes}
    )
    dims, starts = list(view.dims), list(view.starts)
    for axis in sorted(removed):
        dims.insert(axis, ())
        starts.insert(axis, 0)
    return replace(view, value=call.args[0], dims=tuple(dims), starts=tuple(starts))


def _sliced(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    lists = [integers_of(arg) for arg in call.args[1:]]
    axes, begins, steps = lists[0], lists[1], lists[3] if len(lists) > 3 else [1]
    if axes is None or begins is None or steps is None or any(step != 1 for step in steps):
        return None
    shape = shape_of(call.args[0]) or []
    starts = list(view.starts)
    for axis, begin in zip(axes, begins, strict=True):
        extent = shape[axis]
        if begin < 0 and not isinstance(extent, tirx.IntImm):
            return None
        starts[axis] += max(0, begin + int(extent)) if begin < 0 else begin
    return replace(view, value=call.args[0], starts=tuple(starts))


def _indexed(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The operand of ``take`` with one index: a further dimension of which one index is used."""
    index = call.args[1]
    shape = shape_of(call.args[0]) or []
    if not isinstance(index, tvm.ir.GenericConst) or shape_of(index) != [] or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    if not isinstance(shape[axis], tirx.IntImm):
        return None
    dims, starts = list(view.dims), list(view.starts)
    dims.insert(axis, ())
    starts.insert(axis, int(index.value.numpy()) % int(shape[axis]))
    return replace(view, value=call.args[0], dims=tuple(dims), starts=tuple(starts))


def _scaled(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    operand, scale = call.args
    number = scalar_of(scale)
    if op_name(call) == "relax.divide":
        return None if number in (None, 0) else replace(view, value=operand, factor=view.factor / number)
    if number is None:
        operand, number = scale, scalar_of(operand)
    if number is None or len(shape_of(operand) or []) != len(view.dims):
        return None
    return replace(view, value=operand, factor=view.factor * number)


def _recast(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    types = {str(call.attrs.dtype), str(call.args[0].ty.dtype)}
    return replace(view, value=call.args[0]) if types <= {*HALF_TYPES, "float32"} else None


def _repeated(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The operand of ``repeat`` of every head."""
    if call.attrs.axis is None or any(view.starts):
        return None
    axis = int(call.attrs.axis) % len(view.dims)
    if view.dims[axis] != ("g", "r"):
        return None
    dims = tuple(("g",) if position == axis else names for position, names in enumerate(view.dims))
    return replace(view, value=call.args[0], dims=dims)


def _broadcast(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The operand of broadcast_to, which may only broadcast "r", the query heads that share a key head."""
    shape = shape_of(call.args[0]) or []
    if len(shape) != len(view.dims) or any(view.starts):
        return None
    dims = tuple(
        () if is_one(extent) and names == ("r",) else names for extent, names in zip(shape, view.dims, strict=True)
    )
    is_valid = [
        same_extent(old, new) or names == ("r",)
        for old, new, names in zip(shape, shape_of(call) or [], view.dims, strict=True)
    ]
    return replace(view, value=call.args[0], dims=dims) if all(is_valid) else None


_TRACE_BACK = {
    PERMUTE: _permuted,
    RESHAPE: _reshaped,
    "relax.expand_dims": _expanded,
    "relax.squeeze": _squeezed,
    "relax.strided_slice": _sliced,
    "relax.take": _indexed,
    "relax.multiply": _scaled,
    "relax.divide": _scaled,
    CAST: _recast,
    "relax.broadcast_to": _broadcast,
    "relax.repeat": _repeated,
}


def repeated_heads(block: Block, value: relax.Expr) -> int:
    """Number of query heads for which a key or value head is repeated in `value`; 1 without repetition."""
    call = block.definition(value)
    while op_name(call) in _TRACE_BACK:
        if op_name(call) == "relax.repeat":
            return int(call.attrs.repeats)
        if op_name(call) == "relax.broadcast_to":
            pairs = zip(shape_of(call.args[0]) or [], shape_of(call) or [], strict=False)
            sizes = [new for old, new in pairs if is_one(old) and not is_one(new)]
            return int(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tirx.IntImm) else 1
        call = block.definition(call.args[0])
    return 1


def _split(block: Block, view: HeadsTrace, item: relax.TupleGetItem) -> HeadsTrace | None:
    call = block.definition(item.tuple_value)
    if op_name(call) != "relax.split":
        return None
    shape = shape_of(call.args[0])
    if shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    sections = call.attrs.indices_or_sections
    index = int(item.index)
    if isinstance(sections, (int, tirx.IntImm)):
        if not isinstance(shape[axis], tirx.IntImm):
            return None
        begin = -(-int(shape[axis]) // int(sections)) * index
    else:
        begin = 0 if index == 0 else int(sections[index - 1])
    starts = list(view.starts)
    starts[axis] += begin
    return replace(view, value=call.args[0], starts=tuple(starts))


def regrouped(dims: Dims, shape: Sequence[Any], sizes: Mapping[str, Any]) -> Dims | None:
    """Dimensions of the same elements in another shape; None if it splits an iteration dimension."""
    names = [name for dim in dims for name in dim if not is_one(sizes[name])]
    groups: list[tuple[str, ...]] = []
    for extent in shape:
        group: list[str] = []
        product: Any = tirx.IntImm("int64", 1)
        while names and not same_extent(product, extent):
            group.append(names.pop(0))
            product = tvm.sym.Analyzer().simplify(product * sizes[group[-1]])
        # Iteration dimensions that share a dimension need static sizes, which kernels divide by.
        if not same_extent(product, extent) or (
            len(group) > 1 and not all(isinstance(sizes[name], tirx.IntImm) for name in group)
        ):
            return None
        groups.append(tuple(group))
    return None if names else tuple(groups)


def followed(block: Block, view: HeadsTrace, sizes: Mapping[str, Any]) -> tuple[HeadsTrace, list[int]]:
    """The last value with the view's elements, in any order, and the indices of the bindings up to it.

    Each binding is the only user of the one before; the last value has the innermost dimension of the view.
    """
    best, innermost = view, view.innermost
    best_path: list[int] = []
    path: list[int] = []
    while True:
        index = block.sole_user(view.value)
        if index is None or not isinstance(block.bindings[index], relax.VarBinding):
            return best, best_path
        call, var = block.bindings[index].value, block.bindings[index].var
        name = op_name(call)
        dims: Dims | None = None
        if rounds(call):
            dims = view.dims
        elif name == PERMUTE:
            dims = tuple(view.dims[axis] for axis in permutation(call))
        elif name == RESHAPE and shape_of(var) is not None:
            dims = regrouped(view.dims, shape_of(var) or [], sizes)
        if dims is None:
            return best, best_path
        view = HeadsTrace.of(var, dims)
        path.append(index)
        if view.innermost == innermost:
            best, best_path = view, list(path)


def rounds(value: relax.Expr) -> bool:
    """Return whether a value is a cast from float32 to half precision."""
    is_cast = op_name(value) == CAST and str(value.args[0].ty.dtype) == "float32"
    return is_cast and str(value.attrs.dtype) in HALF_TYPES
