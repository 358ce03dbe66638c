"""The matrix products that convolutions are: some as they stand, all of them of maps that nobody writes down.

A convolution whose window is one element and which skips none multiplies the pixels of a channels-last map by the
weight. Any other multiplies rows of "pixel and window", whose elements a kernel finds in the map: an implicit product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import ConvProblem, Dim, MatmulProblem, Operand

IMAGE_CHANNELS = 4
"""Channels of a pixel of an image as GPUs store it, of which the last may not exist."""


def as_product(problem: ConvProblem) -> MatmulProblem | None:
    """The matrix product that a convolution is whose window is one element and which skips none; None for others.

    Its parameters are the very same buffers: rows of the left operand are the elements of a channels-last image.
    """
    if (
        problem.groups > 1
        or problem.data.layout.inner_dims
        or any((w.size, w.stride, w.before, w.after) != (1, 1, 0, 0) for w in problem.windows)
        or not _is_channels_last(problem.data)
        or not _is_channels_last(problem.result)
    ):
        return None
    weight = problem.weight
    rhs = Operand(weight.shape, weight.dtype, ("n", "k", *("1" for _ in problem.windows)), weight.layout)
    return _product(problem, _physical(problem.data, product_names(problem)), rhs)


def implicit_product(problem: ConvProblem) -> MatmulProblem:
    """The product of rows of "pixel and window" by the weight of one group, places of the window outermost in k.

    Its operands other than the left one are the problem's; of several groups, "n" and what runs along it are those of
    one group, and there is a batch dimension "g" that the result and the weight have.
    """
    names = product_names(problem)
    result = _physical(problem.result, names)
    stored = [_static(size) for size in problem.weight.shape]
    columns = stored[0] // problem.groups
    packed = problem.weight.layout
    # As it is stored: channels, and perhaps places of the window, up to whole tiles.
    depth = prod(-(-size // packed.tile(d)) * packed.tile(d) for d, size in enumerate(stored) if d)
    lhs = Operand((*result.shape[:-1], depth), problem.data.dtype, (*result.index_map[:-1], "k"), _plain(result))
    layout = PackedLayout((1, 0))
    if packed.inner_dims:
        layout = PackedLayout((0, 1), (0, 1), (packed.tile(0), prod(packed.inner_tiles[1:])), swizzle=packed.swizzle)
    return _product(problem, lhs, Operand((columns, depth), problem.weight.dtype, ("n", "k"), layout))


def product_names(problem: ConvProblem) -> dict[str, str]:
    """Dimensions of a product by those of a convolution: the pixels of a row of the map are "m", all others batches."""
    names = {"b": "b0", "c": "k", "n": "n", "1": "1"}
    for d in range(len(problem.windows)):
        name = "m" if d == len(problem.windows) - 1 else f"b{d + 1}"
        names |= {f"x{d}": name, f"y{d}": name}
    return names


def _product(problem: ConvProblem, lhs: Operand, rhs: Operand) -> MatmulProblem:
    names, epilogue = product_names(problem), problem.epilogue
    if epilogue is not None:
        epilogue = replace(epilogue, operands=tuple(_physical(operand, names) for operand in epilogue.operands))
    return MatmulProblem(
        lhs, rhs, _physical(problem.result, names), problem.acc_dtype, epilogue=epilogue, tf32=problem.tf32
    )


def _is_channels_last(operand: Operand) -> bool:
    return operand.layout.outer_perm == (0, *range(2, len(operand.shape)), 1)


def _plain(operand: Operand) -> PackedLayout:
    return PackedLayout.identity(len(operand.shape))


def _physical(operand: Operand, names: dict[str, str]) -> Operand:
    """An operand without tiles as it is stored, row-major."""

    def stored(values: Sequence) -> tuple:
        return tuple(values[d] for d in operand.layout.outer_perm)

    index_map = stored([names[name] for name in operand.index_map])
    return Operand(stored(operand.shape), operand.dtype, index_map, PackedLayout.identity(len(operand.shape)))


def _static(extent: Dim) -> int:
    assert isinstance(extent, int), "weights have known sizes"
    return extent
