"""Fusion of stages into nests of loops: stages over one domain are computed together, and cheap values are inlined.

Before, one stage per line::

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
from ..core.walks import replaced
from .stages import Axis, Load, Stage, loads, node_count, sources, with_loads

_MAX_CHEAP_OPS = 8  # a value of at most so many operations is computed again wherever it is read
_MAX_INLINED_OPS = 96  # a larger value is not inlined
# A value with more nodes, indices and casts included, is not inlined: a chain of values that each read the one before
# twice would double with each of them.
_MAX_INLINED_NODES = 512
# Calls that cost no more than an addition.
_LIGHT_CALLS = frozenset(("prim.if_then_else", "prim.likely", "tirx.reinterpret", "tirx.fabs"))


@dataclass(frozen=True)
class Sum:
    """A reduction: `value` reads the previous value of `buffer`."""

    buffer: tirx.Buffer
    initial: Expr
    value: Expr


@dataclass
class Nest:
    """Loops over one domain."""

    axes: tuple[Axis, ...]
    indices: tuple[tirx.Var, ...]  # indices of the stores: the variables of the axes before any was split
    reduced: tuple[Axis, ...] = ()
    sums: list[Sum] = field(default_factory=list)  # reductions, computed together before the steps
    # Values computed in order at every point; they read sums and earlier steps at the same point.
    steps: list[tuple[tirx.Buffer, Expr]] = field(default_factory=list)
    # Buffers of sums and steps that other nests or the caller read.
    stored: list[tirx.Buffer] = field(default_factory=list)
    # Whether stores may overwrite memory that the nest reads, so that no element may be computed twice.
    in_place: bool = False
    # Variables of axes that were split in two, as expressions of the new ones in `axes`.
    split: dict[tirx.Var, Expr] = field(default_factory=dict)

    @property
    def computed(self) -> list[tirx.Buffer]:
        """Buffers whose values this nest computes."""
        return [s.buffer for s in self.sums] + [buffer for buffer, _ in self.steps]

    def position(self) -> list[Expr]:
        """The indices of the stores."""
        return [self.split.get(var, var) for var in self.indices]

    def expressions(self) -> list[Expr]:
        """All expressions computed at a point."""
        return [s.value for s in self.sums] + [value for _, value in self.steps]


def form_nests(stages: Sequence[Stage], results: Sequence[tirx.Buffer], shares_storage: bool = True) -> list[Nest]:
    """Fuse stages into nests.

    Parameters
    ----------
    results : sequence of Buffer
        Parameters of the function; only later stages read other buffers.
    shares_storage : bool
        Whether an intermediate may use the memory of a result that is stored later.
    """
    stages = _inline(_remove_dead(list(stages), results), results)
    if shares_storage:
        stages = _share_storage(stages, results)
    nests: list[Nest] = []
    for stage in stages:
        nest = _fusible_nest(nests, stage)
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
    read: set[tirx.Buffer] = set()
    for nest in reversed(nests):
        final = {buffer: n for n, buffer in enumerate(nest.computed)}  # the last step that stores each buffer
        nest.stored = [b for b in final if b in results or b in read]
        nest.in_place = any(
            source in nest.stored and final[source] >= n
            for n, (_, value) in enumerate(nest.steps, len(nest.sums))
            for source in sources(value)
        )
        read.update(source for value in nest.expressions() for source in sources(value))
    _mark_shared_memory(nests, results)
    return nests


def _mark_shared_memory(nests: Sequence[Nest], results: Sequence[tirx.Buffer]) -> None:
    """Mark nests as in place that compute one intermediate buffer from another of the same size.

    TVM's StorageRewrite merges the two if the first is not read later and each element is computed from the same
    element; it does not see that elements are computed twice.
    """
    intermediates = [buffer for nest in nests for buffer in nest.stored if buffer not in results]
    for nest in nests:
        stored = [buffer for buffer in nest.stored if buffer in intermediates]
        read = {source for value in nest.expressions() for source in sources(value) if source in intermediates}
        if any(_may_be_as_large(source, buffer) for source in read for buffer in stored):
            nest.in_place = True


def _may_be_as_large(one: tirx.Buffer, other: tirx.Buffer) -> bool:
    sizes = [prod(map(plain_extent, buffer.shape)) for buffer in (one, other)]
    return not all(isinstance(size, int) for size in sizes) or sizes[0] == sizes[1]


def _remove_dead(stages: list[Stage], results: Sequence[tirx.Buffer]) -> list[Stage]:
    """The stages without those whose values are never read."""
    read = set(results)
    live = []
    for stage in reversed(stages):
        if any(buffer in read for buffer in stage.buffers):
            live.append(stage)
            read.update(source for value in stage.values for source in sources(value))
    return live[::-1]


def _inline(stages: list[Stage], results: Sequence[tirx.Buffer], max_uses: int | None = None) -> list[Stage]:
    """The stages with cheap values inlined that are read at other points than their own, at most `max_uses` times.

    A value that is inlined makes its readers read what it reads, which may be inlined then if it is read once: a chain
    of values that each read the one before twice would double with each of them.
    """
    remaining: list[Stage] = []
    inline: dict[tirx.Buffer, Stage] = {}
    reads = _readers(stages)
    for stage in stages:
        stage = _with_inlined(stage, inline)
        buffer = stage.buffers[0]
        if not stage.initial and len(stage.buffers) == 1 and buffer not in results:
            uses = [(stages[later], load) for later, load in reads.get(buffer, ())]
            if (max_uses is None or len(uses) <= max_uses) and _should_inline(stage, uses):
                inline[buffer] = stage
                continue
        remaining.append(stage)
    return _inline(_remove_dead(remaining, results), results, max_uses=1) if inline else remaining


def _reads(computed: Stage | Nest, buffer: tirx.Buffer) -> list[Load]:
    values = computed.values if isinstance(computed, Stage) else computed.expressions()
    return [load for value in values for load in loads(value) if load.source.same_as(buffer)]


def _readers(stages: Sequence[Stage]) -> dict[tirx.Buffer, list[tuple[int, Load]]]:
    """Readers of each buffer and their loads, in order; a reduction's reads of its own result are left out."""
    readers: dict[tirx.Buffer, list[tuple[int, Load]]] = {}
    for number, stage in enumerate(stages):
        for value in stage.values:
            for load in loads(value):
                if load.source not in stage.buffers:
                    readers.setdefault(load.source, []).append((number, load))
    return readers


def _with_inlined(stage: Stage, inline: dict[tirx.Buffer, Stage]) -> Stage:
    def change(load: Load) -> Expr:
        producer = inline.get(load.source)
        if producer is None:
            return load
        vars_ = {axis.var: index for axis, index in zip(producer.spatial, load.indices, strict=True)}
        return replaced(producer.values[0], vars_)

    if not any(source in inline for value in stage.values for source in sources(value)):
        return stage
    return replace(stage, values=tuple(with_loads(value, change) for value in stage.values))


def _should_inline(stage: Stage, uses: list[tuple[Stage, Load]]) -> bool:
    weight, heavy = _weight(stage.values[0])
    if weight > _MAX_INLINED_OPS or node_count(stage.values[0]) > _MAX_INLINED_NODES:
        return False
    in_place = [is_at(load, later) and not later.initial and _same_domain(stage, later) for later, load in uses]
    if all(in_place):
        return False  # it is fused into the nest of its readers
    if weight <= _MAX_CHEAP_OPS and not heavy:
        return True
    return len(uses) == 1 and _size(uses[0][0]) <= _size(stage)


def _weight(expr: Expr) -> tuple[int, bool]:
    """Number of operations without those on indices, and whether one costs more than an addition."""
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
    """Number of points of a stage; symbolic extents count as 1e9."""
    extents = [axis.extent for axis in (*stage.spatial, *stage.reduced)]
    return prod(extent if isinstance(extent, int) else 1e9 for extent in extents)


def is_at(load: Load, computed: Stage | Nest) -> bool:
    """Return whether a load of a stage or nest reads at the point that is computed."""
    axes = _axes(computed)
    return len(load.indices) == len(axes) and all(
        axis.extent == 1 or index.same_as(axis.var) for index, axis in zip(load.indices, axes, strict=True)
    )


def _axes(computed: Stage | Nest) -> tuple[Axis, ...]:
    return computed.spatial if isinstance(computed, Stage) else computed.axes


def _same_domain(one: Stage | Nest, other: Stage | Nest) -> bool:
    axes, other_axes = _axes(one), _axes(other)
    return len(axes) == len(other_axes) and all(
        _same_extent(a.extent, b.extent) for a, b in zip(axes, other_axes, strict=True)
    )


def _same_extent(left: Expr, right: Expr) -> bool:
    return left == right if isinstance(left, int) or isinstance(right, int) else structural_equal(left, right)


def _fusible_nest(nests: list[Nest], stage: Stage) -> Nest | None:
    """The last nest that a stage can be fused into: no later nest computes a value that the stage reads."""
    read = {source for value in stage.values for source in sources(value)}
    if stage.initial or any(buffer in read for buffer in stage.buffers):
        return None
    for nest in reversed(nests):
        needs = [load for value in stage.values for load in loads(value) if load.source in nest.computed]
        if _same_domain(nest, stage) and all(is_at(load, stage) for load in needs):
            return nest
        if needs or any(buffer in read for buffer in nest.computed):
            return None
    return None


def _share_storage(stages: list[Stage], results: Sequence[tirx.Buffer]) -> list[Stage]:
    """The stages with an intermediate in the memory of a result, if only stages up to the result's read it in place."""
    renamed: dict[tirx.Buffer, tirx.Buffer] = {}
    reads = _readers(stages)
    for stage in stages:
        readers = sorted({j for b in stage.buffers for j, _ in reads.get(b, ())})
        if stage.initial or len(stage.buffers) != 1 or len(readers) < 2 or stage.buffers[0] in results:
            continue
        intermediate, last = stage.buffers[0], stages[readers[-1]]
        for buffer in last.buffers if not last.initial else ():
            fits = buffer in results and buffer.dtype == intermediate.dtype and _same_domain(stage, last)
            if (
                fits
                and all(is_at(load, last) for load in _reads(last, intermediate))
                and buffer not in renamed.values()
            ):
                renamed[intermediate] = buffer
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
    """Pairs of an operand and a result of one shape, with the nest that reads the one and stores the other.

    They are candidates for sharing memory: the result is the last value that its nest computes at a point, and no other
    nest touches either. The code must also compute every element once, and read no element after storing it. `nests`:
    result of `form_nests`. `params`: buffers of the function's parameters.
    """
    computed = [buffer for nest in nests for buffer in nest.computed]
    # In order of appearance, so that a kernel's attributes are the same in every process.
    read = [dict.fromkeys(source for value in nest.expressions() for source in sources(value)) for nest in nests]
    pairs = []
    for n, nest in enumerate(nests):
        result = nest.steps[-1][0] if nest.steps and not nest.sums else None
        if result not in params or computed.count(result) != 1 or any(result in nest_reads for nest_reads in read):
            continue
        for operand in read[n]:
            elsewhere = operand in computed or any(operand in nest_reads for m, nest_reads in enumerate(read) if m != n)
            if operand in params and not elsewhere and all(is_at(load, nest) for load in _reads(nest, operand)):
                pairs.append(((operand, result), nest))
    return pairs
