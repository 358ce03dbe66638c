"""Reductions: a thread computes whole results, or threads of a block compute partial results and merge them.

Threads lie along the contiguous dimension for coalesced loads: along the results, where neighbouring results read
neighbouring elements, or along the reduction axis. Partial results are kept in registers, in float32 for 16-bit floats,
and merged by shuffles and in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import ALL_LANES, WARP, GpuTarget
from ...core.builder import Expr, as_type, ceil_div, int64
from ...core.walks import replaced
from ...loops.flat import FlatBox, Loop, is_step
from ...loops.loop_code import nested
from ...loops.reduce_box import value_of
from ..core.dialect import has_ptx
from .lanes import (
    LANE,
    LaneBox,
    compute_steps,
    each_lane,
    element_types,
    from_registers,
    in_lane,
    max_lanes,
    read_vectors,
    register,
    set_lanes,
    store_lanes,
    vectorized,
)
from .launch import count_of, inside, launch, position_of, sync, threads_for
from .merging import Merge, merge_of

Partials = list[tirx.Buffer]  # partial results of a thread: per reduction, a register for each lane
_BLOCK_THREADS = 256  # threads of a block that merge partial results
_MAX_SHARED_BYTES = 48 << 10  # bytes of statically allocated shared memory of a block
_MAX_SERIAL_TERMS = 32  # maximum terms of a result that one thread computes
_MAX_UNROLLED_TERMS = 9  # maximum terms of an unrolled reduction, such as that of a 3x3 pooling window
_UNROLLED_SELECTIONS = 4  # vectors that a thread loads before it selects among their elements

_MIN_VECTORS_PER_THREAD = 4
"""Minimum vectors that a thread reads before partial results are merged, if there are enough threads."""


@dataclass(frozen=True)
class Plan:
    """Distribution of a reduction among threads."""

    threads_per_result: int  # threads that compute partial results of the same results
    are_neighbours: bool  # whether these threads are neighbours; otherwise neighbours compute neighbouring results
    lanes: int  # results of a thread, contiguous along the last loop
    terms: int  # terms that a thread loads as a vector


def write_reduction(box: FlatBox, gpu: GpuTarget) -> None:
    """Write a box as one launch."""
    merge = merge_of(box.nest.sums)
    plan = plan_of(box, merge, gpu)
    if plan.threads_per_result == 1:
        _write_serial(box, merge, plan, gpu)
    else:
        assert merge is not None
        _BlockReduction(box, merge, plan).write()


def plan_of(box: FlatBox, merge: Merge | None, gpu: GpuTarget) -> Plan:
    """Choose between threads along results and threads along the reduction axis, and their number."""
    values = [s.value for s in box.nest.sums]
    results, terms = count_of(box.spatial), count_of(box.reduced)
    last = box.spatial[-1] if box.spatial else None
    inner = box.reduced[-1] if box.reduced else None

    def contiguous(loop: Loop | None) -> bool:
        return loop is not None and any(is_step(s, 1) for value in values for s in box.strides(value, loop.var))

    lanes = _lanes_along(box, last, True) if last is not None and contiguous(last) else 1
    is_short = isinstance(terms, int) and terms <= _MAX_SERIAL_TERMS
    if merge is None or (isinstance(terms, int) and terms < 2):
        return Plan(1, False, lanes, 1)
    # Threads that select compute more for each load, and have several loads in flight.
    target_threads = gpu.multiprocessors * (512 if merge.selects else 1024)
    along_results = last is not None and contiguous(last) and _may_reach(last.count, 4)
    if along_results or is_short:
        threads = results // lanes if isinstance(results, int) else None
        threads_per_result = 1
        if threads is not None and not is_short:
            while (
                threads_per_result < 32
                and threads * threads_per_result < target_threads
                and _may_reach(terms, threads_per_result * 2 * _MIN_VECTORS_PER_THREAD)
            ):
                threads_per_result *= 2
        if threads is None and not is_short and not isinstance(terms, int):
            threads_per_result = 8
        while (
            threads_per_result > 1
            and _block_threads(threads_per_result, False) * lanes * sum(map(bytes_of, merge.types)) > _MAX_SHARED_BYTES
        ):
            threads_per_result //= 2
        return Plan(threads_per_result, False, lanes, 1)
    vector = 1
    if inner is not None and contiguous(inner):
        vector = _lanes_along(box, inner, False)
    units = ceil_div(terms, vector)
    threads_per_result = 2
    while threads_per_result < _BLOCK_THREADS and _may_reach(units, threads_per_result * 2):
        is_enough = isinstance(results, int) and results * threads_per_result >= target_threads
        if is_enough and not _may_reach(units, threads_per_result * _MIN_VECTORS_PER_THREAD * 2):
            break
        threads_per_result *= 2
    return Plan(threads_per_result, True, 1, vector)


def _block_threads(threads_per_result: int, are_neighbours: bool) -> int:
    """Threads of a block in which groups of `threads_per_result` compute neighbouring results."""
    return threads_per_result * max(_BLOCK_THREADS // threads_per_result, 1 if are_neighbours else WARP)


def _may_reach(count: Expr, number: int) -> bool:
    return not isinstance(count, int) or count >= number


def _lanes_along(box: FlatBox, loop: Loop, along_results: bool) -> int:
    lanes = max_lanes(element_types(box))
    while lanes > 1:
        fits = isinstance(loop.count, int) and loop.count % lanes == 0
        if fits and vectorized(box, loop, lanes, along_results).reads:
            return lanes
        lanes //= 2
    return 1


def _write_serial(box: FlatBox, merge: Merge | None, plan: Plan, gpu: GpuTarget) -> None:
    counts = [loop.count for loop in box.spatial]
    if counts:
        counts[-1] = ceil_div(counts[-1], plan.lanes)
    lane_box = vectorized(box, box.spatial[-1], plan.lanes, True) if box.spatial else LaneBox(box, None, 1)
    units: Expr = prod(counts)
    threads = threads_for(units, gpu)
    with launch(ceil_div(units, threads), threads) as (block, thread):
        number = block * threads + thread
        with inside(number, units, threads):
            position = position_of(number, box.spatial, counts) if box.spatial else {}
            position = _scale_to_elements(position, lane_box)
            if merge is not None:
                partials = init_partials(merge, lane_box.lanes)
                with _reduction_loops(box) as terms:
                    accumulate(lane_box, merge, {**position, **terms}, partials)
                add_initial(merge, partials, lane_box.lanes, lane_position(lane_box, position))
                results = merged_results(merge, partials, lane_box.lanes)
            else:
                results = _reduce_in_order(lane_box, position)
            finish(lane_box, position, results)


@contextmanager
def _unrolled(count: int) -> Iterator[Expr]:
    """Context of a loop that the compiler unrolls, so that its loads are in flight together."""
    if count == 1:
        yield int64(0)
        return
    with T.attr(0, "pragma_unroll_explicit", False), T.unroll(int64(count)) as i:
        yield i


@contextmanager
def _reduction_loops(box: FlatBox) -> Iterator[dict[tirx.Var, Expr]]:
    """Context of the reduction loops, unrolled where terms are few so that their loads are in flight together."""
    count = count_of(box.reduced)
    if not isinstance(count, int) or count > _MAX_UNROLLED_TERMS:
        with nested(box.reduced) as terms:
            yield terms
        return
    with T.attr(0, "pragma_unroll_explicit", False), ExitStack() as loops:
        yield {loop.var: loops.enter_context(T.unroll(int64(loop.begin), int64(loop.end))) for loop in box.reduced}


def finish(box: LaneBox, position: Mapping[tirx.Var, Expr], sums: Mapping[tirx.Buffer, tirx.Buffer]) -> None:
    """Compute and store the steps after the reductions at a position."""
    read = read_vectors(box, position, [value for _, value in box.box.nest.steps])
    own = lane_position(box, position)
    store_lanes(box, own, compute_steps(box.box, box.lanes, own, {**sums, **read}))


def _scale_to_elements(position: Mapping[tirx.Var, Expr], box: LaneBox) -> dict[tirx.Var, Expr]:
    if box.lanes == 1 or box.var is None:
        return dict(position)
    return {**position, box.var: position[box.var] * box.lanes}


def lane_position(box: LaneBox, position: Mapping[tirx.Var, Expr]) -> dict[tirx.Var, Expr]:
    """Position in terms of `LANE`, given the position of the first lane."""
    if box.lanes == 1 or box.var is None or box.var not in position:
        return dict(position)
    return {**position, box.var: position[box.var] + LANE}


def init_partials(merge: Merge, lanes: int) -> Partials:
    """Allocate and initialize partial results."""
    partials = [register(dtype, lanes) for dtype in merge.types]
    for partial, value in zip(partials, merge.starts, strict=True):
        set_lanes(partial, lanes, value)
    return partials


def accumulate(box: LaneBox, merge: Merge, position: Mapping[tirx.Var, Expr], partials: Partials) -> None:
    """Merge the terms at a position, one per lane, into the partial results."""
    fresh = merge_terms(box, merge)
    vectors = read_vectors(box, position, fresh)
    own = lane_position(box, position)

    def merge_lane(lane: Expr) -> None:
        terms = [in_lane(replaced(from_registers(term, vectors, {}), own), lane) for term in fresh]
        _merge_into(merge, partials, lane, terms)

    each_lane(box.lanes, merge_lane)


def merge_terms(box: LaneBox, merge: Merge) -> list[Expr]:
    """Terms of a reduction in a vectorized box."""
    vector_merge = merge_of(box.box.nest.sums)
    assert vector_merge is not None and vector_merge.types == merge.types
    return list(vector_merge.terms)


def _merge_into(merge: Merge, partials: Partials, lane: Expr, others: Sequence[Expr]) -> None:
    """Merge values into the partial results of a lane; all are computed before the first is stored."""
    own = [tirx.BufferLoad(partial, [lane]) for partial in partials]
    if len(partials) == 1:
        T.buffer_store(partials[0], in_lane(merge.join(own, others)[0], lane), [lane])
        return
    registers = [_in_register(other) for other in others]
    values = [_in_register(in_lane(value, lane)) for value in merge.join(own, registers)]
    for partial, value in zip(partials, values, strict=True):
        T.buffer_store(partial, value, [lane])


def _in_register(value: Expr) -> Expr:
    single = register(str(value.ty.dtype), 1)
    T.buffer_store(single, value, [int64(0)])
    return tirx.BufferLoad(single, [int64(0)])


def add_initial(merge: Merge, partials: Partials, lanes: int, position: Mapping[tirx.Var, Expr]) -> None:
    """Merge the initial values of results where they differ from those of partial results."""
    for i, final in enumerate(merge.finals):
        if final is None:
            continue
        value = merge.joined[i]

        def merge_final(lane: Expr, i: int = i, value: Expr = value, final: Expr = final) -> None:
            own = {merge.own[i]: replaced(final, position), merge.new[i]: tirx.BufferLoad(partials[i], [lane])}
            T.buffer_store(partials[i], in_lane(replaced(value, own), lane), [lane])

        each_lane(lanes, merge_final)


def merged_results(merge: Merge, partials: Partials, lanes: int) -> dict[tirx.Buffer, tirx.Buffer]:
    """Cast the merged results to their types; the registers of each by its buffer."""
    results: dict[tirx.Buffer, tirx.Buffer] = {}
    for s, partial, dtype in zip(merge.sums, partials, merge.types, strict=True):
        results[s.buffer] = partial
        if dtype != str(s.buffer.dtype):
            results[s.buffer] = result = register(str(s.buffer.dtype), lanes)

            def cast_lane(lane: Expr, result: tirx.Buffer = result, partial: tirx.Buffer = partial) -> None:
                T.buffer_store(result, tirx.Cast(str(result.dtype), tirx.BufferLoad(partial, [lane])), [lane])

            each_lane(lanes, cast_lane)
    return results


def _reduce_in_order(box: LaneBox, position: Mapping[tirx.Var, Expr]) -> dict[tirx.Buffer, tirx.Buffer]:
    """Compute reductions without partial results, term by term in order."""
    sums = box.box.nest.sums
    accumulators = {s.buffer: register(str(s.buffer.dtype), box.lanes) for s in sums}
    own = lane_position(box, position)
    for s in sums:
        set_lanes(accumulators[s.buffer], box.lanes, replaced(s.initial, own))
    with nested(box.box.reduced) as terms:
        vectors = read_vectors(box, {**position, **terms}, [s.value for s in sums])

        def merge_lane(lane: Expr) -> None:
            values = []
            for s in sums:
                value = replaced(from_registers(value_of(s), {**accumulators, **vectors}, {}), {**own, **terms})
                values.append(_in_register(in_lane(value, lane)))
            for s, value in zip(sums, values, strict=True):
                T.buffer_store(accumulators[s.buffer], value, [lane])

        each_lane(box.lanes, merge_lane)
    return accumulators


class _BlockReduction:
    """Launch whose threads compute partial results and merge them within a block."""

    def __init__(self, box: FlatBox, merge: Merge, plan: Plan) -> None:
        self.plan, self.merge, self.scalar_box = plan, merge, LaneBox(box, None, 1)
        if plan.terms > 1:
            self.box = vectorized(box, box.reduced[-1], plan.terms, False)
        elif plan.lanes > 1:
            self.box = vectorized(box, box.spatial[-1], plan.lanes, True)
        else:
            self.box = LaneBox(box, None, 1)
        self.groups = _block_threads(plan.threads_per_result, plan.are_neighbours) // plan.threads_per_result

    def write(self) -> None:
        """Write the launch."""
        box, plan, merge = self.box, self.plan, self.merge
        spatial = box.box.spatial
        counts = [loop.count for loop in spatial]
        if plan.lanes > 1:
            counts[-1] = counts[-1] // plan.lanes
        units: Expr = prod(counts)
        if isinstance(units, int):
            while self.groups > 1 and self.groups > units and plan.are_neighbours:
                self.groups //= 2
        threads = self.groups * plan.threads_per_result
        with launch(ceil_div(units, self.groups), threads) as (block, thread):
            if plan.are_neighbours:
                group, rank = (
                    tirx.floordiv(thread, int64(plan.threads_per_result)),
                    tirx.floormod(thread, int64(plan.threads_per_result)),
                )
            else:
                group, rank = tirx.floormod(thread, int64(self.groups)), tirx.floordiv(thread, int64(self.groups))
            number = block * self.groups + group
            is_whole = isinstance(units, int) and units > 0 and units % self.groups == 0
            # Threads without a result compute the last one: all threads of a block must reach the barriers.
            clamped = number if is_whole else T.max(T.min(number, int64(units) - 1), int64(0))
            position = _scale_to_elements(position_of(clamped, spatial, counts) if spatial else {}, self._stored_box())
            partials = init_partials(merge, max(plan.lanes, plan.terms))
            if isinstance(units, int):
                if units:
                    self._accumulate(position, rank, partials)
            else:
                with T.If(int64(units) > 0), T.Then():  # without results, inputs may be empty
                    self._accumulate(position, rank, partials)
            if plan.terms > 1:
                self._merge_lanes(partials)
            self._merge_threads(partials, thread, rank, threads)
            is_first = tirx.EQ(rank, int64(0))
            with T.If(is_first if is_whole else tirx.all(is_first, number < int64(units))), T.Then():
                stored_box = self._stored_box()
                add_initial(merge, partials, stored_box.lanes, lane_position(stored_box, position))
                finish(stored_box, position, merged_results(merge, partials, stored_box.lanes))

    def _stored_box(self) -> LaneBox:
        """The box as results are stored: scalar if its vectors lie along the reduction axis."""
        return self.box if self.plan.lanes > 1 else self.scalar_box

    def _accumulate(self, position: Mapping[tirx.Var, Expr], rank: Expr, partials: Partials) -> None:
        box, plan = self.box, self.plan
        reduced = box.box.reduced
        counts = [loop.count for loop in reduced]
        if plan.terms > 1:
            counts[-1] = counts[-1] // plan.terms
        units: Expr = prod(counts)

        def accumulate_unit(number: Expr) -> None:
            point = position_of(number, reduced, counts)
            if plan.terms > 1:
                point = {**point, reduced[-1].var: point[reduced[-1].var] * plan.terms}
            accumulate(box, self.merge, {**position, **point}, partials)

        if isinstance(units, int):
            iterations = units // plan.threads_per_result
            # NVIDIA's compilers unroll sums themselves, but not the longer code of selections.
            step = _UNROLLED_SELECTIONS if self.merge.selects else 1
            if whole := iterations // step:
                with T.serial(int64(whole)) as i, _unrolled(step) as j:
                    accumulate_unit((i * step + j) * plan.threads_per_result + rank)
            if rest := iterations % step:
                with _unrolled(rest) as j:
                    accumulate_unit((whole * step + j) * plan.threads_per_result + rank)
            if units % plan.threads_per_result:
                with T.If(rank < int64(units % plan.threads_per_result)), T.Then():
                    accumulate_unit(rank + iterations * plan.threads_per_result)
            return
        with T.serial(ceil_div(units, plan.threads_per_result)) as i:
            with T.If(i * plan.threads_per_result + rank < units), T.Then():
                accumulate_unit(i * plan.threads_per_result + rank)

    def _merge_lanes(self, partials: Partials) -> None:
        count = self.plan.terms
        while count > 1:
            count //= 2
            for lane in range(count):
                others = [tirx.BufferLoad(p, [int64(lane + count)]) for p in partials]
                _merge_into(self.merge, partials, int64(lane), others)

    def _merge_threads(self, partials: Partials, thread: Expr, rank: Expr, threads: int) -> None:
        """Merge partial results by warp shuffles or in shared memory; the first thread of a group has the result."""
        threads_per_result, lanes = self.plan.threads_per_result, self.plan.lanes
        if self.plan.are_neighbours and not has_ptx():
            self._merge_in_shared_memory(partials, thread, threads)
            return
        if self.plan.are_neighbours:
            width = min(threads_per_result, WARP)
            while width > 1:
                width //= 2
                _merge_into(self.merge, partials, int64(0), [from_below(p, width) for p in partials])
            if threads_per_result <= WARP:
                return
            buffers = [T.alloc_buffer((threads // WARP,), dtype, scope="shared") for dtype in self.merge.types]
            warp = tirx.floordiv(thread, int64(WARP))
            with T.If(tirx.EQ(tirx.floormod(thread, int64(WARP)), int64(0))), T.Then():
                for shared, own in zip(buffers, partials, strict=True):
                    T.buffer_store(shared, tirx.BufferLoad(own, [int64(0)]), [warp])
            sync()
            with T.If(tirx.EQ(rank, int64(0))), T.Then():
                for other in range(1, threads_per_result // WARP):
                    _merge_into(self.merge, partials, int64(0), [tirx.BufferLoad(m, [warp + other]) for m in buffers])
            return
        buffers = [T.alloc_buffer((threads * lanes,), dtype, scope="shared") for dtype in self.merge.types]
        for lane in range(lanes):
            for shared, own in zip(buffers, partials, strict=True):
                T.buffer_store(shared, tirx.BufferLoad(own, [int64(lane)]), [thread + lane * threads])
        sync()
        with T.If(tirx.EQ(rank, int64(0))), T.Then():
            for other in range(1, threads_per_result):
                for lane in range(lanes):
                    index = thread + (other * self.groups + lane * threads)
                    _merge_into(self.merge, partials, int64(lane), [tirx.BufferLoad(m, [index]) for m in buffers])

    def _merge_in_shared_memory(self, partials: Partials, thread: Expr, threads: int) -> None:
        """Merge partial results of neighbours in a tree.

        All threads take part, as TVM rejects barriers in branches; only the first half of the values is read again.
        """
        buffers = [T.alloc_buffer((threads,), dtype, scope="shared") for dtype in self.merge.types]
        width = self.plan.threads_per_result
        while width > 1:
            width //= 2
            for shared, own in zip(buffers, partials, strict=True):
                T.buffer_store(shared, tirx.BufferLoad(own, [int64(0)]), [thread])
            sync()
            other = T.min(thread + width, int64(threads - 1))
            _merge_into(self.merge, partials, int64(0), [tirx.BufferLoad(shared, [other]) for shared in buffers])
            sync()


def from_below(value_register: tirx.Buffer, distance: int) -> Expr:
    """Value of the thread `distance` lanes further on in the warp, in a register of its own.

    A shuffle inside an expression could end up in a divergent branch, as TVM lowers selections to branches.
    """
    dtype = str(value_register.dtype)
    wide = dtype
    if bytes_of(dtype) < 4:  # shuffles exchange words; the wide type represents every narrow value
        wide = "float32" if "float" in dtype else "int32"
    value: Expr = tirx.BufferLoad(value_register, [int64(0)])
    numbers = [tirx.const(n, "int32") for n in (distance, WARP, WARP)]
    shuffled = tirx.call_intrin(
        wide, "tirx.tvm_warp_shuffle_down", tirx.const(ALL_LANES, "uint32"), as_type(value, wide), *numbers
    )
    return as_type(_in_register(shuffled), dtype)
