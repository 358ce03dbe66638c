"""Reductions: a thread computes whole results, or the threads of a block compute parts of one and join them.

Threads lie along what is contiguous in memory: along the results, where neighbouring results read neighbouring
elements, or along what is reduced. Parts are kept in registers, in float32 for 16-bit floats, and joined in shared
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div, int64
from ...loops.flat import FlatBox, Loop, is_step
from ...loops.loop_code import nested
from ...loops.reduce_box import value_of
from ...loops.stages import replaced
from .lanes import (
    LANE,
    LaneBox,
    compute_steps,
    each_lane,
    element_types,
    in_lane,
    read_vectors,
    reading,
    register,
    set_lanes,
    store_lanes,
    vectorized,
    widest,
)
from .launch import count_of, inside, launch, place_in, sync, threads_for
from .merging import Merge, merge_of

Parts = list[tirx.Buffer]
"""Registers of a thread: of each reduction, its lanes."""

_BLOCK = 256
"""Threads of a block that join parts."""

_MAX_SHARED = 48 << 10
"""Bytes of shared memory that a block has without asking for more."""

_FEW_TERMS = 32
"""Up to so many terms a result is computed by one thread."""

_WRITTEN_OUT = 9
"""Up to so many terms, such as those of a pooling window, are written out."""

_TERMS_A_THREAD = 4
"""Vectors that a thread reads, at least, before parts are joined, where there are threads enough."""


@dataclass(frozen=True)
class Plan:
    """Who computes what.

    Attributes
    ----------
    threads_per_result : int
        Threads that compute parts of the same results.
    are_neighbours : bool
        Whether these are neighbours; otherwise neighbours compute neighbouring results.
    lanes : int
        Results of a thread, contiguous along the last loop.
    terms : int
        Terms that a thread reads as a vector.
    """

    threads_per_result: int
    are_neighbours: bool
    lanes: int
    terms: int


def write_reduction(box: FlatBox, gpu: GpuTarget) -> None:
    """Write a box as one launch."""
    merge = merge_of(box.nest.sums)
    plan = plan_of(box, merge, gpu)
    if plan.threads_per_result == 1:
        _write_serial(box, merge, plan, gpu)
    else:
        assert merge is not None
        _Together(box, merge, plan).write()


def plan_of(box: FlatBox, merge: Merge | None, gpu: GpuTarget) -> Plan:
    """Along results or along what is reduced, and with how many threads."""
    values = [s.value for s in box.nest.sums]
    results, terms = count_of(box.spatial), count_of(box.reduced)
    last = box.spatial[-1] if box.spatial else None
    inner = box.reduced[-1] if box.reduced else None

    def contiguous(loop: Loop | None) -> bool:
        return loop is not None and any(is_step(s, 1) for value in values for s in box.strides(value, loop.var))

    lanes = _lanes_along(box, last, True) if last is not None and contiguous(last) else 1
    few = isinstance(terms, int) and terms <= _FEW_TERMS
    if merge is None or (isinstance(terms, int) and terms < 2):
        return Plan(1, False, lanes, 1)
    wanted = gpu.multiprocessors * 1024
    along_results = last is not None and contiguous(last) and _at_least(last.count, 4)
    if along_results or few:
        threads = results // lanes if isinstance(results, int) else None
        threads_per_result = 1
        if threads is not None and not few:
            while (
                threads_per_result < 32
                and threads * threads_per_result < wanted
                and _at_least(terms, threads_per_result * 2 * _TERMS_A_THREAD)
            ):
                threads_per_result *= 2
        if threads is None and not few and not isinstance(terms, int):
            threads_per_result = 8
        while (
            threads_per_result > 1
            and _threads(threads_per_result, False) * lanes * sum(map(bytes_of, merge.types)) > _MAX_SHARED
        ):
            threads_per_result //= 2
        return Plan(threads_per_result, False, lanes, 1)
    vector = 1
    if inner is not None and contiguous(inner):
        vector = _lanes_along(box, inner, False)
    units = ceil_div(terms, vector)
    threads_per_result = 2
    while threads_per_result < _BLOCK and _at_least(units, threads_per_result * 2):
        is_enough = isinstance(results, int) and results * threads_per_result >= wanted
        if is_enough and not _at_least(units, threads_per_result * _TERMS_A_THREAD * 2):
            break
        threads_per_result *= 2
    return Plan(threads_per_result, True, 1, vector)


def _threads(threads_per_result: int, are_neighbours: bool) -> int:
    """Number of threads of a block in which so many compute parts of the same results; others compute neighbours."""
    return threads_per_result * max(_BLOCK // threads_per_result, 1 if are_neighbours else WARP)


def _at_least(count: Expr, number: int) -> bool:
    return not isinstance(count, int) or count >= number


def _lanes_along(box: FlatBox, loop: Loop, along_results: bool) -> int:
    lanes = widest(element_types(box))
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
    made = vectorized(box, box.spatial[-1], plan.lanes, True) if box.spatial else LaneBox(box, None, 1)
    units: Expr = 1
    for count in counts:
        units = units * count
    threads = threads_for(units, gpu)
    with launch(ceil_div(units, threads), threads) as (block, thread):
        number = block * threads + thread
        with inside(number, units, threads):
            position = place_in(number, box.spatial, counts) if box.spatial else {}
            position = _in_elements(position, made)
            if merge is not None:
                parts = start(merge, made.lanes)
                with _each_term(box) as terms:
                    accumulate(made, merge, {**position, **terms}, parts)
                add_initial(merge, parts, made.lanes, lane_position(made, position))
                held = finished(merge, parts, made.lanes)
            else:
                held = _in_order(made, position)
            finish(made, position, held)


@contextmanager
def _each_term(box: FlatBox) -> Iterator[dict[tirx.Var, Expr]]:
    """Loops over what is reduced, written out where terms are few: loads of one do not wait for those before."""
    count = count_of(box.reduced)
    if not isinstance(count, int) or count > _WRITTEN_OUT:
        with nested(box.reduced) as terms:
            yield terms
        return
    with T.attr(0, "pragma_unroll_explicit", False), ExitStack() as loops:
        yield {loop.var: loops.enter_context(T.unroll(int64(loop.begin), int64(loop.end))) for loop in box.reduced}


def finish(box: LaneBox, position: Mapping[tirx.Var, Expr], sums: Mapping[tirx.Buffer, tirx.Buffer]) -> None:
    """Compute what follows the reductions at a position, and store it."""
    read = read_vectors(box, position, [value for _, value in box.box.nest.steps])
    own = lane_position(box, position)
    store_lanes(box, own, compute_steps(box.box, box.lanes, own, {**sums, **read}))


def _in_elements(position: Mapping[tirx.Var, Expr], box: LaneBox) -> dict[tirx.Var, Expr]:
    if box.lanes == 1 or box.var is None:
        return dict(position)
    return {**position, box.var: position[box.var] * box.lanes}


def lane_position(box: LaneBox, position: Mapping[tirx.Var, Expr]) -> dict[tirx.Var, Expr]:
    """The position of a lane, where `position` is that of the first."""
    if box.lanes == 1 or box.var is None or box.var not in position:
        return dict(position)
    return {**position, box.var: position[box.var] + LANE}


def start(merge: Merge, lanes: int) -> Parts:
    """Registers for parts, with what parts start from."""
    parts = [register(dtype, lanes) for dtype in merge.types]
    for part, value in zip(parts, merge.starts, strict=True):
        set_lanes(part, lanes, value)
    return parts


def accumulate(box: LaneBox, merge: Merge, position: Mapping[tirx.Var, Expr], parts: Parts) -> None:
    """Join the terms at a position, one a lane, to the parts."""
    fresh = merge_terms(box, merge)
    held = read_vectors(box, position, fresh)
    own = lane_position(box, position)

    def join(lane: Expr) -> None:
        terms = [in_lane(replaced(reading(term, held, {}), own), lane) for term in fresh]
        _join_into(merge, parts, lane, terms)

    each_lane(box.lanes, join)


def merge_terms(box: LaneBox, merge: Merge) -> list[Expr]:
    """The terms of a reduction as a box with vectors has them."""
    again = merge_of(box.box.nest.sums)
    assert again is not None and again.types == merge.types
    return list(again.terms)


def _join_into(merge: Merge, parts: Parts, at: Expr, others: Sequence[Expr]) -> None:
    """Join values to the parts of a lane: all are computed before the first is stored."""
    own = [tirx.BufferLoad(part, [at]) for part in parts]
    if len(parts) == 1:
        T.buffer_store(parts[0], in_lane(merge.join(own, others)[0], at), [at])
        return
    found = [_once(other) for other in others]
    values = [_once(in_lane(value, at)) for value in merge.join(own, found)]
    for part, value in zip(parts, values, strict=True):
        T.buffer_store(part, value, [at])


def _once(value: Expr) -> Expr:
    single = register(str(value.ty.dtype), 1)
    T.buffer_store(single, value, [int64(0)])
    return tirx.BufferLoad(single, [int64(0)])


def add_initial(merge: Merge, parts: Parts, lanes: int, position: Mapping[tirx.Var, Expr]) -> None:
    """Join what the whole starts from, where that is not what parts start from."""
    for i, final in enumerate(merge.finals):
        if final is None:
            continue
        value = merge.joined[i]

        def write(lane: Expr, i: int = i, value: Expr = value, final: Expr = final) -> None:
            own = {merge.own[i]: replaced(final, position), merge.new[i]: tirx.BufferLoad(parts[i], [lane])}
            T.buffer_store(parts[i], in_lane(replaced(value, own), lane), [lane])

        each_lane(lanes, write)


def finished(merge: Merge, parts: Parts, lanes: int) -> dict[tirx.Buffer, tirx.Buffer]:
    """The results in registers of their own type, by what they are results of."""
    held: dict[tirx.Buffer, tirx.Buffer] = {}
    for s, part, dtype in zip(merge.sums, parts, merge.types, strict=True):
        held[s.buffer] = part
        if dtype != str(s.buffer.dtype):
            held[s.buffer] = result = register(str(s.buffer.dtype), lanes)

            def write(lane: Expr, result: tirx.Buffer = result, part: tirx.Buffer = part) -> None:
                T.buffer_store(result, tirx.Cast(str(result.dtype), tirx.BufferLoad(part, [lane])), [lane])

            each_lane(lanes, write)
    return held


def _in_order(box: LaneBox, position: Mapping[tirx.Var, Expr]) -> dict[tirx.Buffer, tirx.Buffer]:
    """Reductions that cannot be computed in parts: every term in its turn."""
    sums = box.box.nest.sums
    held = {s.buffer: register(str(s.buffer.dtype), box.lanes) for s in sums}
    own = lane_position(box, position)
    for s in sums:
        set_lanes(held[s.buffer], box.lanes, replaced(s.initial, own))
    with nested(box.box.reduced) as terms:
        read = read_vectors(box, {**position, **terms}, [s.value for s in sums])

        def join(lane: Expr) -> None:
            values = []
            for s in sums:
                value = replaced(reading(value_of(s), {**held, **read}, {}), {**own, **terms})
                values.append(_once(in_lane(value, lane)))
            for s, value in zip(sums, values, strict=True):
                T.buffer_store(held[s.buffer], value, [lane])

        each_lane(box.lanes, join)
    return held


class _Together:
    """Threads of a block that compute parts of the same results."""

    def __init__(self, box: FlatBox, merge: Merge, plan: Plan) -> None:
        self.plan, self.merge, self.whole = plan, merge, LaneBox(box, None, 1)
        if plan.terms > 1:
            self.box = vectorized(box, box.reduced[-1], plan.terms, False)
        elif plan.lanes > 1:
            self.box = vectorized(box, box.spatial[-1], plan.lanes, True)
        else:
            self.box = LaneBox(box, None, 1)
        self.groups = _threads(plan.threads_per_result, plan.are_neighbours) // plan.threads_per_result

    def write(self) -> None:
        """Write the launch."""
        box, plan, merge = self.box, self.plan, self.merge
        spatial = box.box.spatial
        counts = [loop.count for loop in spatial]
        if plan.lanes > 1:
            counts[-1] = counts[-1] // plan.lanes
        units: Expr = 1
        for count in counts:
            units = units * count
        if isinstance(units, int):
            while self.groups > 1 and self.groups > units and plan.are_neighbours:
                self.groups //= 2
        threads = self.groups * plan.threads_per_result
        with launch(ceil_div(units, self.groups), threads) as (block, thread):
            if plan.are_neighbours:
                group, part = (
                    tirx.floordiv(thread, int64(plan.threads_per_result)),
                    tirx.floormod(thread, int64(plan.threads_per_result)),
                )
            else:
                group, part = tirx.floormod(thread, int64(self.groups)), tirx.floordiv(thread, int64(self.groups))
            number = block * self.groups + group
            is_whole = isinstance(units, int) and units > 0 and units % self.groups == 0
            # Threads without a result compute the last one's, as all of a block meet where parts are joined.
            at = number if is_whole else T.max(T.min(number, int64(units) - 1), int64(0))
            position = _in_elements(place_in(at, spatial, counts) if spatial else {}, self._along_results())
            lanes = max(plan.lanes, plan.terms)
            parts = start(merge, lanes)
            if isinstance(units, int):
                if units:
                    self._accumulate(position, part, parts)
            else:
                with T.If(int64(units) > 0), T.Then():  # where there is no result, there is nothing to read
                    self._accumulate(position, part, parts)
            if plan.terms > 1:
                self._join_lanes(parts)
            self._join_threads(parts, thread, part, threads)
            is_first = tirx.EQ(part, int64(0))
            with T.If(is_first if is_whole else tirx.all(is_first, number < int64(units))), T.Then():
                made = self._along_results()
                add_initial(merge, parts, made.lanes, lane_position(made, position))
                finish(made, position, finished(merge, parts, made.lanes))

    def _along_results(self) -> LaneBox:
        """The box as results are stored: with no lanes where these are along what is reduced."""
        return self.box if self.plan.lanes > 1 else self.whole

    def _accumulate(self, position: Mapping[tirx.Var, Expr], part: Expr, parts: Parts) -> None:
        box, plan = self.box, self.plan
        reduced = box.box.reduced
        counts = [loop.count for loop in reduced]
        if plan.terms > 1:
            counts[-1] = counts[-1] // plan.terms
        units: Expr = 1
        for count in counts:
            units = units * count

        def at(number: Expr) -> None:
            place = place_in(number, reduced, counts)
            if plan.terms > 1:
                place = {**place, reduced[-1].var: place[reduced[-1].var] * plan.terms}
            accumulate(box, self.merge, {**position, **place}, parts)

        if isinstance(units, int):
            whole = units // plan.threads_per_result
            if whole:
                with T.serial(int64(whole)) as i:
                    at(i * plan.threads_per_result + part)
            if units % plan.threads_per_result:
                with T.If(part < int64(units % plan.threads_per_result)), T.Then():
                    at(part + whole * plan.threads_per_result)
            return
        with T.serial(ceil_div(units, plan.threads_per_result)) as i:
            with T.If(i * plan.threads_per_result + part < units), T.Then():
                at(i * plan.threads_per_result + part)

    def _join_lanes(self, parts: Parts) -> None:
        count = self.plan.terms
        while count > 1:
            count //= 2
            for lane in range(count):
                others = [tirx.BufferLoad(p, [int64(lane + count)]) for p in parts]
                _join_into(self.merge, parts, int64(lane), others)

    def _join_threads(self, parts: Parts, thread: Expr, part: Expr, threads: int) -> None:
        """Neighbours by shuffles within a warp, all others in shared memory; the first of a group has the whole."""
        threads_per_result, lanes = self.plan.threads_per_result, self.plan.lanes
        if self.plan.are_neighbours:
            width = min(threads_per_result, WARP)
            while width > 1:
                width //= 2
                _join_into(self.merge, parts, int64(0), [from_below(p, width) for p in parts])
            if threads_per_result <= WARP:
                return
            memory = [T.alloc_buffer((threads // WARP,), dtype, scope="shared") for dtype in self.merge.types]
            warp = tirx.floordiv(thread, int64(WARP))
            with T.If(tirx.EQ(tirx.floormod(thread, int64(WARP)), int64(0))), T.Then():
                for shared, own in zip(memory, parts, strict=True):
                    T.buffer_store(shared, tirx.BufferLoad(own, [int64(0)]), [warp])
            sync()
            with T.If(tirx.EQ(part, int64(0))), T.Then():
                for other in range(1, threads_per_result // WARP):
                    _join_into(self.merge, parts, int64(0), [tirx.BufferLoad(m, [warp + other]) for m in memory])
            return
        memory = [T.alloc_buffer((threads * lanes,), dtype, scope="shared") for dtype in self.merge.types]
        for lane in range(lanes):
            for shared, own in zip(memory, parts, strict=True):
                T.buffer_store(shared, tirx.BufferLoad(own, [int64(lane)]), [thread + lane * threads])
        sync()
        with T.If(tirx.EQ(part, int64(0))), T.Then():
            for other in range(1, threads_per_result):
                for lane in range(lanes):
                    at = thread + (other * self.groups + lane * threads)
                    _join_into(self.merge, parts, int64(lane), [tirx.BufferLoad(m, [at]) for m in memory])


_ALL = 0xFFFFFFFF


def from_below(part: tirx.Buffer, distance: int) -> Expr:
    """The number of the thread that is so many threads further on in the warp, in a register of its own.

    A shuffle within an expression could come to stand behind a condition: TVM writes a choice of it as a branch, which
    only some threads of the warp take.
    """
    dtype = str(part.dtype)
    sent = dtype
    if bytes_of(dtype) < 4:  # of words alone; every number of a narrow type is one of the wide type, too
        sent = "float32" if "float" in dtype else "int32"
    value: Expr = tirx.BufferLoad(part, [int64(0)])
    numbers = [tirx.const(n, "int32") for n in (distance, WARP, WARP)]
    moved = tirx.call_intrin(
        sent, "tirx.tvm_warp_shuffle_down", tirx.const(_ALL, "uint32"), _cast(value, sent), *numbers
    )
    return _cast(_once(moved), dtype)


def _cast(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
