"""Stages joined into nests of loops: what stands at one place is computed in one go, cheap values where they are read.

Before, a stage a line::

    padded[i]  = 0 if i < 1 else x[i - 1]
    sum[i]    += padded[i + r]
    mean[i]    = sum[i] / 3

After, one nest over i::

    reduce r: sum += (0 if i + r < 1 else x[i + r - 1]);   mean = sum / 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import tvm
from tvm import tirx
from tvm_ffi import WalkResult, structural_equal, structural_walk

from ..core.builder import Expr, plain_extent
from .stages import Axis, Load, Stage, loads, node_count, replaced, sources, with_loads

# Up to so many operations are repeated wherever their value is read rather than stored once.
_CHEAP = 8
# A value read in another order is stored once its expression has grown beyond this.
_LARGE = 96
# Nor is a value repeated whose expression has so many nodes, indices and casts included: a chain of values that each
# read the one before twice would double with each of them.
_TOO_LARGE = 512
# Calls that cost no more than an addition.
_LIGHT_CALLS = frozenset(("prim.if_then_else", "prim.likely", "tirx.reinterpret", "tirx.fabs"))


@dataclass(frozen=True)
class Sum:
    """A reduction: `value` reads what is in `buffer` so far."""

    buffer: tirx.Buffer
    initial: Expr
    value: Expr


@dataclass
class Nest:
    """Loops over one domain.

    Attributes
    ----------
    indices : tuple of Var
        Indices of the stores: the variables of the axes, before any was split.
    sums : list of Sum
        Computed together, first.
    steps : list of (Buffer, PrimExpr)
        Computed in order at every point; they read sums and earlier steps where they stand, at the same point.
    stored : list of Buffer
        Buffers of sums and steps that other nests or the caller read.
    in_place : bool
        A stored buffer is read too, or what is stored may lie over what is read, so no element may be computed twice.
    split : dict of Var to PrimExpr
        Axes that were split in two, in terms of their parts, which stand in `axes` instead.
    """

    axes: tuple[Axis, ...]
    indices: tuple[tirx.Var, ...]
    reduced: tuple[Axis, ...] = ()
    sums: list[Sum] = field(default_factory=list)
    steps: list[tuple[tirx.Buffer, Expr]] = field(default_factory=list)
    stored: list[tirx.Buffer] = field(default_factory=list)
    in_place: bool = False
    split: dict[tirx.Var, Expr] = field(default_factory=dict)

    @property
    def made(self) -> list[tirx.Buffer]:
        """Buffers whose values this nest computes."""
        return [s.buffer for s in self.sums] + [buffer for buffer, _ in self.steps]

    def position(self) -> list[Expr]:
        """The indices that are stored at."""
        return [self.split.get(var, var) for var in self.indices]

    def expressions(self) -> list[Expr]:
        """Everything computed at a point."""
        return [s.value for s in self.sums] + [value for _, value in self.steps]


def form_nests(stages: Sequence[Stage], results: Sequence[tirx.Buffer], shares_storage: bool = True) -> list[Nest]:
    """Join stages.

    Parameters
    ----------
    results : sequence of Buffer
        Parameters of the function; everything else is read by later stages only.
    shares_storage : bool
        Whether a value may be kept where a result is stored later, so that a nest reads what it overwrites.
    """
    stages = _inlined(_live(list(stages), results), results)
    if shares_storage:
        stages = _share_storage(stages, results)
    nests: list[Nest] = []
    for stage in stages:
        nest = _home(nests, stage)
        if nest is None:
            nest = Nest(stage.spatial, tuple(axis.var for axis in stage.spatial), stage.reduced)
            nests.append(nest)
        vars_ = {mine.var: its.var for mine, its in zip(stage.spatial, nest.axes, strict=True)}
        if stage.initial:
            for buffer, initial, value in zip(stage.buffers, stage.initial, stage.values, strict=True):
                nest.sums.append(Sum(buffer, replaced(initial, vars_), replaced(value, vars_)))
        else:
            for buffer, value in zip(stage.buffers, stage.values, strict=True):
                nest.steps.append((buffer, replaced(value, vars_)))
    read: set[tirx.Buffer] = set()  # by later nests
    for nest in reversed(nests):
        final = {buffer: n for n, buffer in enumerate(nest.made)}  # of two steps that store, the last
        nest.stored = [b for b in final if b in results or b in read]
        nest.in_place = any(
            source in nest.stored and final[source] >= n
            for n, (_, value) in enumerate(nest.steps, len(nest.sums))
            for source in sources(value)
        )
        read.update(source for value in nest.expressions() for source in sources(value))
    _note_shared_memory(nests, results)
    return nests


def _note_shared_memory(nests: Sequence[Nest], results: Sequence[tirx.Buffer]) -> None:
    """Nests from memory of the kernel to as much other memory of the kernel are in place.

    TVM's StorageRewrite gives the two one memory where each element of one is computed from that element of the other,
    which nobody reads later; it does not see elements that are computed twice.
    """
    inner = [buffer for nest in nests for buffer in nest.stored if buffer not in results]
    for nest in nests:
        stored = [buffer for buffer in nest.stored if buffer in inner]
        read = {source for value in nest.expressions() for source in sources(value) if source in inner}
        if any(_may_be_as_large(source, buffer) for source in read for buffer in stored):
            nest.in_place = True


def _may_be_as_large(one: tirx.Buffer, other: tirx.Buffer) -> bool:
    sizes = [prod(map(plain_extent, buffer.shape)) for buffer in (one, other)]
    return not all(isinstance(size, int) for size in sizes) or sizes[0] == sizes[1]


def _live(stages: list[Stage], results: Sequence[tirx.Buffer]) -> list[Stage]:
    """Without stages whose values nobody reads."""
    read = set(results)
    kept = []
    for stage in reversed(stages):
        if any(buffer in read for buffer in stage.buffers):
            kept.append(stage)
            read.update(source for value in stage.values for source in sources(value))
    return kept[::-1]


def _inlined(stages: list[Stage], results: Sequence[tirx.Buffer]) -> list[Stage]:
    """With values that are read elsewhere than at their own place computed where they are read, where that is cheap."""
    done: list[Stage] = []
    inline: dict[tirx.Buffer, Stage] = {}
    reads = _readers(stages)
    for stage in stages:
        stage = _with_values(stage, inline)
        buffer = stage.buffers[0]
        if not stage.initial and len(stage.buffers) == 1 and buffer not in results:
            uses = [(stages[later], load) for later, load in reads.get(buffer, ())]
            if _is_inlined(stage, uses):
                inline[buffer] = stage
                continue
        done.append(stage)
    return _live(done, results)


def _reads(computed: Stage | Nest, buffer: tirx.Buffer) -> list[Load]:
    values = computed.values if isinstance(computed, Stage) else computed.expressions()
    return [load for value in values for load in loads(value) if load.source.same_as(buffer)]


def _readers(stages: Sequence[Stage]) -> dict[tirx.Buffer, list[tuple[int, Load]]]:
    """Readers of each buffer and their loads, in order; a reduction's reads of its own result are left out."""
    found: dict[tirx.Buffer, list[tuple[int, Load]]] = {}
    for number, stage in enumerate(stages):
        for value in stage.values:
            for load in loads(value):
                if load.source not in stage.buffers:
                    found.setdefault(load.source, []).append((number, load))
    return found


def _with_values(stage: Stage, inline: dict[tirx.Buffer, Stage]) -> Stage:
    def change(load: Load) -> Expr:
        maker = inline.get(load.source)
        if maker is None:
            return load
        vars_ = {axis.var: index for axis, index in zip(maker.spatial, load.indices, strict=True)}
        return replaced(maker.values[0], vars_)

    if not any(source in inline for value in stage.values for source in sources(value)):
        return stage
    return replace(stage, values=tuple(with_loads(value, change) for value in stage.values))


def _is_inlined(stage: Stage, uses: list[tuple[Stage, Load]]) -> bool:
    weight, heavy = _weight(stage.values[0])
    if weight > _LARGE or node_count(stage.values[0]) > _TOO_LARGE:
        return False
    in_place = [is_at(load, later) and not later.initial and _alike(stage, later) for later, load in uses]
    if all(in_place):
        return False  # it joins the nest of whoever reads it
    if weight <= _CHEAP and not heavy:
        return True
    return len(uses) == 1 and _size(uses[0][0]) <= _size(stage)


def _weight(expr: Expr) -> tuple[int, bool]:
    """How many operations an expression has beside those on indices, and whether one costs more than an addition."""
    count, heavy = 0, False

    def on_node(node: Expr) -> WalkResult | None:
        nonlocal count, heavy
        if isinstance(node, Load):
            return WalkResult.SKIP
        if isinstance(node, (tvm.ir.Var, tirx.IntImm, tirx.FloatImm)) or node.ty.dtype != expr.ty.dtype:
            return None
        count += 1
        heavy = heavy or isinstance(node, tirx.Div)
        heavy = heavy or (isinstance(node, tvm.ir.Call) and node.op.name not in _LIGHT_CALLS)
        return None

    structural_walk(expr, (tvm.ir.Expr, on_node), order="pre")
    return count, heavy


def _size(stage: Stage) -> float:
    """How many points it computes; very many where extents are unknown."""
    extents = [axis.extent for axis in (*stage.spatial, *stage.reduced)]
    return prod(extent if isinstance(extent, int) else 1e9 for extent in extents)


def is_at(load: Load, computed: Stage | Nest) -> bool:
    """Return whether a stage or nest reads at the place that it computes."""
    axes = _axes(computed)
    return len(load.indices) == len(axes) and all(
        axis.extent == 1 or index.same_as(axis.var) for index, axis in zip(load.indices, axes, strict=True)
    )


def _axes(computed: Stage | Nest) -> tuple[Axis, ...]:
    return computed.spatial if isinstance(computed, Stage) else computed.axes


def _alike(one: Stage | Nest, other: Stage | Nest) -> bool:
    mine, its = _axes(one), _axes(other)
    return len(mine) == len(its) and all(_same(a.extent, b.extent) for a, b in zip(mine, its, strict=True))


def _same(left: Expr, right: Expr) -> bool:
    return left == right if isinstance(left, int) or isinstance(right, int) else structural_equal(left, right)


def _home(nests: list[Nest], stage: Stage) -> Nest | None:
    """The last nest that a stage can be part of: after it, nothing that the stage reads is made."""
    read = {source for value in stage.values for source in sources(value)}
    if stage.initial or any(buffer in read for buffer in stage.buffers):
        return None
    for nest in reversed(nests):
        needs = [load for value in stage.values for load in loads(value) if load.source in nest.made]
        if _alike(nest, stage) and all(is_at(load, stage) for load in needs):
            return nest
        if needs or any(buffer in read for buffer in nest.made):
            return None
    return None


def _share_storage(stages: list[Stage], results: Sequence[tirx.Buffer]) -> list[Stage]:
    """With what is read only where a result of the same form is computed, kept in that result's storage."""
    renamed: dict[tirx.Buffer, tirx.Buffer] = {}
    reads = _readers(stages)
    for stage in stages:
        readers = sorted({j for b in stage.buffers for j, _ in reads.get(b, ())})
        if stage.initial or len(stage.buffers) != 1 or len(readers) < 2 or stage.buffers[0] in results:
            continue
        mine, last = stage.buffers[0], stages[readers[-1]]
        for buffer in last.buffers if not last.initial else ():
            alike = buffer in results and buffer.dtype == mine.dtype and _alike(stage, last)
            if alike and all(is_at(load, last) for load in _reads(last, mine)) and buffer not in renamed.values():
                renamed[mine] = buffer
                break
    if not renamed:
        return stages

    def change(load: Load) -> Expr:
        return tirx.BufferLoad(renamed[load.source], load.indices) if load.source in renamed else load

    return [
        replace(
            stage,
            buffers=tuple(renamed.get(b, b) for b in stage.buffers),
            values=tuple(with_loads(value, change) for value in stage.values),
        )
        for stage in stages
    ]


def tied_in(nests: Sequence[Nest], params: Sequence[tirx.Buffer]) -> list[tuple[tuple[tirx.Buffer, tirx.Buffer], Nest]]:
    """Pairs of an operand and a result of one form, with the nest that reads the one and stores the other.

    They are candidates to be one memory. Whether they may be is up to the code: it must compute no element twice, nor
    read for one what it stores for another. The result is the last that its nest computes at a point, and no other
    nest touches either.

    Parameters
    ----------
    nests : sequence of Nest
        As `form_nests` gives them.
    params : sequence of Buffer
        Buffers of the function's parameters.
    """
    made = [buffer for nest in nests for buffer in nest.made]
    # In order of appearance, so that a kernel's attributes are the same in every process.
    read = [dict.fromkeys(source for value in nest.expressions() for source in sources(value)) for nest in nests]
    found = []
    for n, nest in enumerate(nests):
        result = nest.steps[-1][0] if nest.steps and not nest.sums else None
        if result not in params or made.count(result) != 1 or any(result in others for others in read):
            continue
        for operand in read[n]:
            elsewhere = operand in made or any(operand in others for m, others in enumerate(read) if m != n)
            if operand in params and not elsewhere and all(is_at(load, nest) for load in _reads(nest, operand)):
                found.append(((operand, result), nest))
    return found
