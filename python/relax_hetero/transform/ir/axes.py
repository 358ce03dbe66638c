"""Orders of dimensions: permutations as tuples, and what a reshape does to one.

``v = permute_dims(u, axes)`` is what `axes` always says here: dimension i of v is dimension ``axes[i]`` of u. The pair
(u, axes) is "v in the order `axes`"; u is how v lies in memory, and `axes` is how v is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax, tirx

from .blocks import is_one, same_extent

Axes: TypeAlias = tuple[int, ...]


def identity(rank: int) -> Axes:
    """The order in which a tensor is anyway."""
    return tuple(range(rank))


def inverse(axes: Axes) -> Axes:
    """The permutation that undoes `axes`."""
    found = [0] * len(axes)
    for position, axis in enumerate(axes):
        found[axis] = position
    return tuple(found)


def then(first: Axes, second: Axes) -> Axes:
    """``permute_dims(permute_dims(x, first), second)`` as one permutation of x."""
    return tuple(first[axis] for axis in second)


def permuted(values: Sequence[Any], axes: Axes) -> list[Any]:
    """Values that belong to each dimension of v, in the order of the dimensions of u."""
    return [values[axis] for axis in inverse(axes)]


def is_order_preserving(shape: Sequence[Any], axes: Axes) -> bool:
    """Return whether a permutation of a tensor of `shape` moves no element: only extents of 1 change places."""
    moved = [axis for axis in axes if not is_one(shape[axis])]
    return moved == sorted(moved)


@dataclass(frozen=True)
class Reshaped:
    """A reshape of v done on u.

    Attributes
    ----------
    operand : Axes
        The order in which v must lie: dimensions that are merged must be neighbours.
    shape : list of PrimExpr
        Shape of the result.
    result : Axes
        The order in which the reshape's result then lies.
    """

    operand: Axes
    shape: list[Any]
    result: Axes


def reshaped(source: Sequence[Any], target: Sequence[Any], axes: Axes) -> Reshaped | None:
    """How a reshape from `source` to `target` is done where its operand lies in the order `axes`.

    A reshape splits and merges neighbouring dimensions. What is split stays where it is; what is merged has to be
    together and in order, which takes a real permutation where it is not. None where the dimensions of the two shapes
    do not correspond provably.
    """
    groups = _groups(source, target)
    if groups is None:
        return None
    groups.sort(key=lambda group: axes[group[0][0]])
    wanted = [dim for dims, _ in groups for dim in dims]
    lies = [dim for dim in inverse(axes) if not is_one(source[dim])]
    if wanted != lies:
        ones = [dim for dim in range(len(source)) if is_one(source[dim])]
        axes = inverse(tuple(ones + wanted))
    made = [dim for _, dims in groups for dim in dims]
    placed = _with_ones(made, target)
    return Reshaped(axes, [target[dim] for dim in placed], inverse(tuple(placed)))


def _with_ones(made: list[int], target: Sequence[Any]) -> list[int]:
    """Dimensions of extent 1 join `made`: each behind the dimension before it, the leading ones in front."""
    placed = list(made)
    for dim in range(len(target)):
        if is_one(target[dim]):
            placed.insert(placed.index(dim - 1) + 1 if dim else 0, dim)
    return placed


def _groups(source: Sequence[Any], target: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Dimensions (without those of extent 1) of the two shapes that hold the same elements, each group minimal."""
    left = [dim for dim in range(len(source)) if not is_one(source[dim])]
    right = [dim for dim in range(len(target)) if not is_one(target[dim])]
    groups = []
    while left and right:
        if same_extent(source[left[0]], target[right[0]]):
            groups.append(([left.pop(0)], [right.pop(0)]))
            continue
        group: tuple[list[int], list[int]] = ([], [])
        sizes = [1, 1]
        while not group[0] or sizes[0] != sizes[1]:
            side = 0 if sizes[0] <= sizes[1] else 1
            shape, rest = ((source, left), (target, right))[side]
            if not rest or not isinstance(shape[rest[0]], tirx.IntImm) or int(shape[rest[0]]) == 0:
                return None
            sizes[side] *= int(shape[rest[0]])
            group[side].append(rest.pop(0))
        groups.append(group)
    return None if left or right else groups


def permutation(call: relax.Call) -> Sequence[int]:
    """The axes of a permute_dims, every one written out and counted from the front."""
    ndim = int(call.args[0].ty.ndim)
    axes = call.attrs.axes
    return [ndim - 1 - i for i in range(ndim)] if axes is None else [int(axis) % ndim for axis in axes]
