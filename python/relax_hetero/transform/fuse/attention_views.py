"""Where an attention's operands come from and where its result goes, through permutations, reshapes, slices and casts.

A `HeadsTrace` says along which iteration dimensions each dimension of a tensor runs. `traced` goes back from an operand
to the tensor that it was made of, as long as every op on the way only moves, scales or rounds elements; `followed`
goes on from the result in the same way.
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
from ..ir.rewriting import op_name

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class HeadsTrace:
    """A tensor and where the heads lie in it.

    Attributes
    ----------
    value : relax.Expr
    dims, starts
        See `HeadsMap`.
    factor : float
        Factor of its elements.
    """

    value: relax.Expr
    dims: Dims
    starts: tuple[int, ...]
    factor: float = 1.0

    @staticmethod
    def of(value: relax.Expr, dims: Sequence[Sequence[str]]) -> HeadsTrace:
        """A whole tensor."""
        return HeadsTrace(value, tuple(map(tuple, dims)), (0,) * len(dims))

    @property
    def map(self) -> HeadsMap:
        """Where the heads lie."""
        return HeadsMap(self.dims, self.starts)

    @property
    def innermost(self) -> str:
        """The iteration dimension of neighbours in memory, "" for none."""
        return self.dims[-1][-1] if self.dims and self.dims[-1] else ""


def traced(block: Block, view: HeadsTrace, sizes: Mapping[str, Any], innermost: tuple[str, ...]) -> HeadsTrace:
    """The earliest value whose elements the view is, if in another order; its neighbours run along `innermost`.

    `innermost` are names that are each as good as the other. What is scaled between two casts is scaled without them.
    """
    best, dtype = view, str(view.value.ty.dtype)
    while True:
        before = _before(block, view, sizes)
        if before is None:
            return best
        view = before
        is_near = view.innermost in innermost or best.innermost not in innermost
        if is_near and str(view.value.ty.dtype) == dtype:
            best = view


def _before(block: Block, view: HeadsTrace, sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """The view of the operand of the op that made a value, None where that op does more than move elements."""
    call = block.definition(view.value)
    if isinstance(call, relax.TupleGetItem):
        return _before_split(block, view, call)
    step = _STEPS.get(op_name(call) or "")
    if step is None or shape_of(call.args[0]) is None:
        return None
    return step(view, call, sizes)


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
    """Before expand_dims: without the dimensions of one."""
    rank = len(view.dims)
    new = {int(axis) % rank for axis in call.attrs.axis}
    if any(view.dims[axis] or view.starts[axis] for axis in new):
        return None
    kept = [axis for axis in range(rank) if axis not in new]
    dims, starts = tuple(view.dims[axis] for axis in kept), tuple(view.starts[axis] for axis in kept)
    return replace(view, value=call.args[0], dims=dims, starts=starts)


def _squeezed(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace:
    """Before squeeze: with the dimensions of one."""
    shape = shape_of(call.args[0]) or []
    axes = call.attrs.axis
    gone = (
        {axis for axis, extent in enumerate(shape) if is_one(extent)}
        if axes is None
        else {int(axis) % len(shape) for axis in axes}
    )
    dims, starts = list(view.dims), list(view.starts)
    for axis in sorted(gone):
        dims.insert(axis, ())
        starts.insert(axis, 0)
    return replace(view, value=call.args[0], dims=tuple(dims), starts=tuple(starts))


def _sliced(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    lists = [_ints(arg) for arg in call.args[1:]]
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


def _taken(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """Before ``take`` of one place: that place of a further dimension."""
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
    left, right = call.args
    number = scalar_of(right)
    if op_name(call) == "relax.divide":
        return None if number in (None, 0) else replace(view, value=left, factor=view.factor / number)
    if number is None:
        left, number = right, scalar_of(left)
    if number is None or len(shape_of(left) or []) != len(view.dims):
        return None
    return replace(view, value=left, factor=view.factor * number)


def _recast(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    types = {str(call.attrs.dtype), str(call.args[0].ty.dtype)}
    return replace(view, value=call.args[0]) if types <= {*HALF_TYPES, "float32"} else None


def _repeated(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """Before ``repeat`` of every head."""
    if call.attrs.axis is None or any(view.starts):
        return None
    axis = int(call.attrs.axis) % len(view.dims)
    if view.dims[axis] != ("g", "r"):
        return None
    dims = tuple(("g",) if position == axis else names for position, names in enumerate(view.dims))
    return replace(view, value=call.args[0], dims=dims)


def _shared(view: HeadsTrace, call: relax.Call, _sizes: Mapping[str, Any]) -> HeadsTrace | None:
    """Before broadcast_to: a dimension that was one is not run along any more. Only "r" may be: heads that share."""
    found = shape_of(call.args[0]) or []
    if len(found) != len(view.dims) or any(view.starts):
        return None
    dims = tuple(
        () if is_one(extent) and names == ("r",) else names for extent, names in zip(found, view.dims, strict=True)
    )
    same = [
        same_extent(old, new) or names == ("r",)
        for old, new, names in zip(found, shape_of(call) or [], view.dims, strict=True)
    ]
    return replace(view, value=call.args[0], dims=dims) if all(same) else None


_STEPS = {
    PERMUTE: _permuted,
    RESHAPE: _reshaped,
    "relax.expand_dims": _expanded,
    "relax.squeeze": _squeezed,
    "relax.strided_slice": _sliced,
    "relax.take": _taken,
    "relax.multiply": _scaled,
    "relax.divide": _scaled,
    CAST: _recast,
    "relax.broadcast_to": _shared,
    "relax.repeat": _repeated,
}


def sharing(block: Block, value: relax.Expr) -> int:
    """How many heads share a key or value that is repeated for them on the way to `value`; 1 where none is."""
    call = block.definition(value)
    while op_name(call) in _STEPS:
        if op_name(call) == "relax.repeat":
            return int(call.attrs.repeats)
        if op_name(call) == "relax.broadcast_to":
            pairs = zip(shape_of(call.args[0]) or [], shape_of(call) or [], strict=False)
            grown = [new for old, new in pairs if is_one(old) and not is_one(new)]
            return int(grown[0]) if len(grown) == 1 and isinstance(grown[0], tirx.IntImm) else 1
        call = block.definition(call.args[0])
    return 1


def _before_split(block: Block, view: HeadsTrace, item: relax.TupleGetItem) -> HeadsTrace | None:
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
    """The same elements in another shape: whole iteration dimensions share its dimensions. None where they do not."""
    names = [name for dim in dims for name in dim if not is_one(sizes[name])]
    found: list[tuple[str, ...]] = []
    for extent in shape:
        group: list[str] = []
        product: Any = tirx.IntImm("int64", 1)
        while names and not same_extent(product, extent):
            group.append(names.pop(0))
            product = tvm.sym.Analyzer().simplify(product * sizes[group[-1]])
        # One dimension of several needs their sizes: numbers, so that no kernel has to guess.
        if not same_extent(product, extent) or (
            len(group) > 1 and not all(isinstance(sizes[name], tirx.IntImm) for name in group)
        ):
            return None
        found.append(tuple(group))
    return None if names else tuple(found)


def _ints(arg: relax.Expr) -> list[int] | None:
    fields = getattr(arg, "fields", None)
    if fields is None and isinstance(arg, relax.ShapeExpr):
        fields = arg.values
    if fields is None:
        return None
    values = [field if isinstance(field, tirx.IntImm) else getattr(field, "value", None) for field in fields]
    known = [int(value) for value in values if isinstance(value, (int, tirx.IntImm))]
    return known if len(known) == len(values) else None


def followed(block: Block, view: HeadsTrace, sizes: Mapping[str, Any]) -> tuple[HeadsTrace, list[int]]:
    """The last value that is the view's elements in another order, and the bindings that are passed on the way.

    Each is the only user of the one before; the last one's neighbours are neighbours in the view.
    """
    best, innermost = view, view.innermost
    passed: list[int] = []
    steps: list[int] = []
    while True:
        index = block.sole_user(view.value)
        if index is None or not isinstance(block.bindings[index], relax.VarBinding):
            return best, passed
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
            return best, passed
        view = HeadsTrace.of(var, dims)
        steps.append(index)
        if view.innermost == innermost:
            best, passed = view, list(steps)


def rounds(value: relax.Expr) -> bool:
    """Return whether this is a cast from float32 to half precision."""
    is_cast = op_name(value) == CAST and str(value.args[0].ty.dtype) == "float32"
    return is_cast and str(value.attrs.dtype) in HALF_TYPES
