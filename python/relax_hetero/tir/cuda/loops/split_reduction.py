"""Long reductions with few results in two launches: many blocks compute parts of each result, then a block joins them.

Before::

    sum[0] = reduce i in 67108864: x[i]

After::

    part[s] = reduce i in 131072: x[s * 131072 + i]      # for s in 512
    sum[0] = reduce s in 512: part[s]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, int64
from ...loops.flat import FlatBox, Loop
from ...loops.nests import Nest, Sum
from ...loops.stages import replaced
from .launch import count_of
from .merging import Merge, merge_of

_BLOCKS = 4
"""Blocks for each multiprocessor that a reduction should have."""

_MIN_TERMS = 2048
"""Minimum number of terms of a part: fewer are not worth a launch more."""

_FEW_PARTS = 8
"""Fewer parts are left to one launch."""


@dataclass(frozen=True)
class Halves:
    """A reduction in two launches.

    Attributes
    ----------
    parts : tuple of Buffer
        Partial results, which the first stores and the second reads.
    """

    first: FlatBox
    second: FlatBox
    parts: tuple[tirx.Buffer, ...]


def halves_of(box: FlatBox, gpu: GpuTarget) -> Halves | None:
    """The two halves of a reduction; None where one launch has blocks enough."""
    merge = merge_of(box.nest.sums)
    results, terms = count_of(box.spatial), count_of(box.reduced)
    if merge is None or not isinstance(results, int) or not isinstance(terms, int) or results == 0:
        return None
    wanted = gpu.multiprocessors * _BLOCKS
    # As `reduction.plan_of` has it, a block for each result, or for 32 vectors of neighbouring ones.
    blocks = results if terms >= _MIN_TERMS else 0
    most = terms // _MIN_TERMS
    if blocks == 0 or blocks * 4 > wanted or most < _FEW_PARTS:
        return None
    most = min(most, -(-wanted // blocks))
    return _halves(box, merge, *(_divisor(box.reduced, most) or _longest(box.reduced, most)))


def _divisor(loops: tuple[Loop, ...], most: int) -> tuple[Loop, int] | None:
    """The loop to cut, and into how many equal parts."""
    best: tuple[int, Loop] | None = None
    for loop in loops:
        for parts in range(min(most, loop.count), 3, -1):
            rest = loop.count // parts
            if loop.count % parts == 0 and (loop is not loops[-1] or rest % 4 == 0 or loop.count % 4):
                if best is None or parts > best[0]:
                    best = parts, loop
                break
    return (best[1], best[0]) if best is not None else None


def _longest(loops: tuple[Loop, ...], most: int) -> tuple[Loop, int]:
    """The loop to cut where none has equal parts, and into how many parts, of which the last is shorter."""
    loop = max(loops, key=lambda each: each.count)
    size = -(-loop.count // min(most, loop.count))
    return loop, -(-loop.count // size)


def _halves(box: FlatBox, merge: Merge, cut: Loop, splits: int) -> Halves:
    size = prod([loop.count for loop in box.spatial])
    split, rest = tirx.Var("split", "int64"), tirx.Var(cut.var.name, "int64")
    parts = [tirx.decl_buffer((splits * size,), dtype, f"part{i}") for i, dtype in enumerate(merge.types)]
    totals = [tirx.decl_buffer((size,), dtype, f"total{i}") for i, dtype in enumerate(merge.types)]
    place: Expr = int64(0)
    for loop in box.spatial:
        place = place * loop.count + loop.var
    here = split * size + place
    length = -(-cut.count // splits)
    number = split * length + rest
    terms = [replaced(term, {cut.var: number}) for term in merge.terms]
    if cut.count % splits:
        terms = [
            tirx.if_then_else(number < cut.count, term, start) for term, start in zip(terms, merge.starts, strict=True)
        ]
    reduced = tuple(Loop(rest, 0, length) if loop is cut else loop for loop in box.reduced)
    first = FlatBox(
        Nest((), (), sums=_sums(merge, parts, here, terms, list(merge.starts)), stored=list(parts)),
        (Loop(split, 0, splits), *box.spatial),
        reduced,
        {part: here for part in parts},
    )
    found = [tirx.BufferLoad(part, [here]) for part in parts]
    initial = [start if final is None else final for start, final in zip(merge.starts, merge.finals, strict=True)]
    steps = [
        (s.buffer, tirx.Cast(str(s.buffer.dtype), load) if str(s.buffer.dtype) != str(load.ty.dtype) else load)
        for s, load in zip(merge.sums, [tirx.BufferLoad(total, [place]) for total in totals], strict=True)
    ]
    second = FlatBox(
        Nest(
            (),
            (),
            sums=_sums(merge, totals, place, found, initial),
            steps=[*steps, *box.nest.steps],
            stored=list(box.nest.stored),
        ),
        box.spatial,
        (Loop(split, 0, splits),),
        box.places,
    )
    return Halves(first, second, tuple(parts))


def _sums(merge: Merge, buffers: list[tirx.Buffer], place: Expr, terms: list[Expr], initial: list[Expr]) -> list[Sum]:
    own = [tirx.BufferLoad(buffer, [place]) for buffer in buffers]
    return [
        Sum(buffer, start, value) for buffer, start, value in zip(buffers, initial, merge.join(own, terms), strict=True)
    ]
