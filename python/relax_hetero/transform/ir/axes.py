"""Orders of dimensions: permutations as tuples, and the effect of a reshape on them.

`axes` always means ``v = permute_dims(u, axes)`` here: dimension i of v is dimension ``axes[i]`` of u. The pair
(u, axes) is "v in the order `axes`": u is the tensor in memory, and `axes` tells how to read v from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax, tirx

from .blocks import is_one, same_extent

Axes: TypeAlias = tuple[int, ...]


def identity(rank: int) -> Axes:
    """The permutation that changes nothing."""
    return tuple(range(rank))


def inverse(axes: Axes) -> Axes:
    """The permutation that undoes `axes`."""
    result = [0] * len(axes)
    for position, axis in enumerate(axes):
        result[axis] = position
    return tuple(result)


def axes_of(attribute: Any, rank: int) -> list[int]:
    """The axes of an op's attribute: a number, a list, or None for all."""
    if attribute is None:
        return list(range(rank))
    return [int(axis) % rank for axis in ([attribute] if isinstance(attribute, (int, tirx.IntImm)) else attribute)]


def compose(first: Axes, second: Axes) -> Axes:
    """``permute_dims(permute_dims(x, first), second)`` as one permutation of x."""
    return tuple(first[axis] for axis in second)


def permuted(values: Sequence[Any], axes: Axes) -> list[Any]:
    """Values that belong to each dimension of v, in the order of the dimensions of u."""
    return [values[axis] for axis in inverse(axes)]


def is_order_preserving(shape: Sequence[Any], axes: Axes) -> bool:
    """Return whether a permutation of a tensor of `shape` moves no element: only dimensions of extent 1 move."""
    moved = [axis for axis in axes if not is_one(shape[axis])]
    return moved == sorted(moved)


@dataclass(frozen=True)
class Reshaped:
    """A reshape of v computed from u."""

    operand: Axes  # the order that v must have: merged dimensions must be neighbours
    shape: list[Any]  # shape of the result
    result: Axes  # the order of the reshape's result


def reshaped(source: Sequence[Any], target: Sequence[Any], axes: Axes) -> Reshaped | None:
    """A reshape from `source` to `target` of an operand in the order `axes`.

    A reshape splits and merges neighbouring dimensions. Split dimensions stay where they are; merged ones must be
    neighbours and in order, which takes a real permutation if they are not. None if the dimensions of the two shapes
    do not provably correspond.
    """
    groups = dimension_groups(source, target)
    if groups is None:
        return None
    groups.sort(key=lambda group: axes[group[0][0]])
    order = [dim for dims, _ in groups for dim in dims]
    current = [dim for dim in inverse(axes) if not is_one(source[dim])]
    if order != current:
        ones = [dim for dim in range(len(source)) if is_one(source[dim])]
        axes = inverse(tuple(ones + order))
    dims = [dim for _, target_dims in groups for dim in target_dims]
    for dim in range(len(target)):  # each of extent 1 follows the dimension before it
        if is_one(target[dim]):
            dims.insert(dims.index(dim - 1) + 1 if dim else 0, dim)
    return Reshaped(axes, [target[dim] for dim in dims], inverse(tuple(dims)))


def dimension_groups(source: Sequence[Any], target: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Minimal groups of dimensions of the two shapes with the same elements; dimensions of extent 1 are left out."""
    source_dims = [dim for dim in range(len(source)) if not is_one(source[dim])]
    target_dims = [dim for dim in range(len(target)) if not is_one(target[dim])]
    groups = []
    while source_dims and target_dims:
        if same_extent(source[source_dims[0]], target[target_dims[0]]):
            groups.append(([source_dims.pop(0)], [target_dims.pop(0)]))
            continue
        group: tuple[list[int], list[int]] = ([], [])
        sizes = [1, 1]
        while not group[0] or sizes[0] != sizes[1]:
            shorter = 0 if sizes[0] <= sizes[1] else 1
            shape, rest = ((source, source_dims), (target, target_dims))[shorter]
            if not rest or not isinstance(shape[rest[0]], tirx.IntImm) or int(shape[rest[0]]) == 0:
                return None
            sizes[shorter] *= int(shape[rest[0]])
            group[shorter].append(rest.pop(0))
        groups.append(group)
    return None if source_dims or target_dims else groups


def permutation(call: relax.Call) -> Sequence[int]:
    """The axes of a permute_dims, all given and counted from the front."""
    ndim = int(call.args[0].ty.ndim)
    axes = call.attrs.axes
    return [ndim - 1 - i for i in range(ndim)] if axes is None else [int(axis) % ndim for axis in axes]
