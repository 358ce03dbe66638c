"""Convolutions as matrix products: pointwise ones directly, all others by implicit im2col.

A pointwise convolution of stride 1 multiplies the pixels of a channels-last map by the weight. Any other multiplies
rows of the im2col matrix, which is not stored: a kernel reads its elements from the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import ConvProblem, Dim, MatmulProblem, Operand

IMAGE_CHANNELS = 4  # channels of a pixel of an image as GPUs store it; the last may be padding


def as_product(problem: ConvProblem) -> MatmulProblem | None:
    """The matrix product of a pointwise convolution with stride 1; None for others.

    Its parameters are the same buffers: rows of the left operand are the pixels of a channels-last image.
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
    """The product of the im2col matrix by the weight of one group, with taps outermost in k.

    All operands but the left one are the problem's. With several groups, "n" and operands along it are those of one
    group, and the result and the weight have a batch dimension "g".
    """
    result = _physical(problem.result, product_names(problem))
    weight_shape = [_static(size) for size in problem.weight.shape]
    columns = weight_shape[0] // problem.groups
    packed = problem.weight.layout
    # The stored depth: channels, and perhaps taps, are padded to whole tiles.
    depth = prod(-(-size // packed.tile(d)) * packed.tile(d) for d, size in enumerate(weight_shape) if d)
    lhs = Operand((*result.shape[:-1], depth), problem.data.dtype, (*result.index_map[:-1], "k"), _plain(result))
    layout = PackedLayout((1, 0))
    if packed.inner_dims:
        layout = PackedLayout((0, 1), (0, 1), (packed.tile(0), prod(packed.inner_tiles[1:])), swizzle=packed.swizzle)
    return _product(problem, lhs, Operand((columns, depth), problem.weight.dtype, ("n", "k"), layout))


def product_names(problem: ConvProblem) -> dict[str, str]:
    """Dimensions of a product by those of a convolution: the pixels of a row of the map are "m", the rest batches."""
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
    """An operand without tiles as a row-major one with permuted dimensions."""

    def permuted(values: Sequence) -> tuple:
        return tuple(values[d] for d in operand.layout.outer_perm)

    index_map = permuted([names[name] for name in operand.index_map])
    return Operand(permuted(operand.shape), operand.dtype, index_map, PackedLayout.identity(len(operand.shape)))


def _static(extent: Dim) -> int:
    assert isinstance(extent, int), "weights have known sizes"
    return extent
