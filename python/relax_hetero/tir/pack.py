"""Kernels that lay a tensor out, undo it, or change one layout into another. Padding is written as zeros.

Parameters of every kernel: source, destination. Symbolic extents are bound from the buffer that shows them; between two
layouts that both pad a symbolic dimension, whole tiles are copied, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.machine import Machine
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import Dim, Operand
from .builder import Expr, Function, ceil_div, flat, loop
from .operand_view import OperandView, extent_of


def pack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, machine: Machine) -> tirx.PrimFunc:
    """Row-major to `layout`.

    Parameters
    ----------
    shape : sequence of int or str
        Logical extents; a symbolic one is a name.
    dtype : str
    layout : PackedLayout
        Of the destination.
    machine : Machine
    """
    return _kernel("pack", shape, dtype, PackedLayout.identity(len(shape)), layout, machine)


def unpack_kernel(shape: Sequence[Dim], dtype: str, layout: PackedLayout, machine: Machine) -> tirx.PrimFunc:
    """`layout` to row-major; parameters as of `pack_kernel`."""
    return _kernel("unpack", shape, dtype, layout, PackedLayout.identity(len(shape)), machine)


def relayout_kernel(
    shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, machine: Machine
) -> tirx.PrimFunc:
    """One layout to another; parameters as of `pack_kernel`."""
    return _kernel("relayout", shape, dtype, source, destination, machine)


def _kernel(
    name: str, shape: Sequence[Dim], dtype: str, source: PackedLayout, destination: PackedLayout, machine: Machine
) -> tirx.PrimFunc:
    names = tuple(f"d{d}" for d in range(len(shape)))
    function = Function(name)
    with function:
        views = [
            OperandView(function, side, Operand(tuple(shape), dtype, names, layout))
            for side, layout in (("source", source), ("destination", destination))
        ]
        with function.body():
            for view in views:
                view.open()
            _copy_elements(views[0], views[1], machine)
            if destination.compensation:
                _compensate(views[1])
    return function.result


def _copy_elements(source: OperandView, destination: OperandView, machine: Machine) -> None:
    """Any layout to any other, element by element."""
    names = destination.index_map
    layout = destination.layout
    extents = {name: extent_of([source, destination], name) for name in names}
    outer: dict[str, Any] = {}
    inner: dict[str, Any] = {}

    def nest(axes: list[tuple[dict[str, Any], str, Expr]]) -> None:
        if not axes:
            at = {name: outer[name] * layout.tile(d) + inner.get(name, 0) for d, name in enumerate(names)}
            inside = [at[n] < extents[n] for d, n in enumerate(names) if not _exact(extents[n], layout.tile(d))]
            value = source.data[source.address(at)]
            if inside:
                condition = inside[0]
                for further in inside[1:]:
                    condition = tirx.And(condition, further)
                value = T.if_then_else(condition, value, tirx.const(0, source.dtype))
            T.buffer_store(destination.data, value, [destination.address(at)])
            return
        into, axis, extent = axes[0]
        with loop(extent) as position:
            into[axis] = position
            nest(axes[1:])

    axes = [(outer, names[d], ceil_div(destination.extents[d], layout.tile(d))) for d in layout.outer_perm]
    axes += [(inner, names[d], tile) for d, tile in zip(layout.inner_dims, layout.inner_tiles, strict=True)]
    nest(axes)


def _exact(extent: Expr, tile: int) -> bool:
    return tile == 1 or (isinstance(extent, int) and extent % tile == 0)


def _compensate(destination: OperandView) -> None:
    """Fill the blocks of ``-128 * column sum`` from what was packed."""
    layout = destination.layout
    *_, last = layout.inner_dims
    names = destination.index_map
    words = flat(destination._buffer, destination._physical, "int32")
    columns = 1
    for tile in layout.inner_tiles[:-1]:
        columns *= tile
    outer: dict[str, Any] = {}

    def nest(dims: list[int]) -> None:
        if not dims:
            at = {n: outer.get(n, 0) * layout.tile(d) for d, n in enumerate(names)}
            stride = tirx.floordiv(destination_stride(last), 4)
            base = tirx.floordiv(destination.address(at, skip_compensation=False), 4)
            with loop(columns) as column:
                total = T.alloc_buffer((1,), "int32", scope="global")
                T.buffer_store(total, tirx.const(0, "int32"), [0])
                with loop(ceil_div(destination.extents[last], 4)) as block:
                    word = T.bind(words[base + (block + 1) * stride + column])
                    added = T.shift_right(word, tirx.const(24, "int32"))
                    for left in (8, 16, 24):
                        high = T.shift_left(word, tirx.const(left, "int32"))
                        added = added + T.shift_right(high, tirx.const(24, "int32"))
                    T.buffer_store(total, total[0] + added, [0])
                T.buffer_store(words, total[0] * tirx.const(-128, "int32"), [base + column])
            return
        with loop(ceil_div(destination.extents[dims[0]], layout.tile(dims[0]))) as position:
            outer[names[dims[0]]] = position
            nest(dims[1:])

    def destination_stride(dim: int) -> Expr:
        distance: Expr = 1
        for extent in destination._physical[layout.outer_perm.index(dim) + 1 :]:
            distance = distance * extent
        return distance

    nest([d for d in layout.outer_perm if d != last])
