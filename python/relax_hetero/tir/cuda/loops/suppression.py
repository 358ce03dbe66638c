"""Non-maximum suppression on GPUs: a block goes through the boxes of one class of one image.

A round drops the boxes that overlap the one taken last and finds the best of those left, in one pass over the boxes by
all threads of the block. Each thread has boxes of its own, so that no two write what both read. How many boxes the
classes before have taken is known when all are done: a second launch writes the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, flat, int64
from .lanes import register
from .launch import launch, sync
from .reduction import from_below

SUPPRESSION = "relax_hetero.suppression"
"""On a PrimFunc that computes a non-maximum suppression: what it computes, a `Suppression` as JSON."""

_THREADS = 256
_WARPS = _THREADS // WARP
_ZERO = int64(0)


@dataclass(frozen=True)
class Suppression:
    """A suppression of boxes ``(batches, boxes, 4)`` by scores ``(batches, classes, boxes)``.

    Attributes
    ----------
    limit : int
        Boxes that a class takes at most.
    is_center : bool
        Whether boxes are given by their centers and sizes, else by opposite corners.
    """

    batches: int
    classes: int
    boxes: int
    limit: int
    is_center: bool

    @property
    def text(self) -> str:
        """As an attribute has it."""
        return json.dumps(asdict(self))


def suppression_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The PrimFunc for a GPU, in two launches.

    Parameters
    ----------
    func : PrimFunc
        With the attribute. Its parameters are boxes, scores, three tensors of one number (how many boxes a class takes
        at most, the overlap that drops a box, the least score), the places ``(batches * classes * limit, 3)`` of the
        boxes that were taken, and their number.
    """
    problem = Suppression(**json.loads(str(func.attrs[SUPPRESSION])))
    function = Function("non_max_suppression")
    with function:
        kernel = _Kernel(function, problem)
        with function.body():
            kernel.allocate()
            kernel.take()
            kernel.write()
    made = function.result
    return tirx.PrimFunc(made.params, made.body, func.ret_type, func.attrs, func.span).with_attr(
        "tirx.is_scheduled", True
    )


class _Kernel:
    def __init__(self, function: Function, problem: Suppression) -> None:
        self.problem = p = problem
        self.groups = p.batches * p.classes
        shapes: dict[str, tuple[list[int], str]] = {
            "box": ([p.batches, p.boxes, 4], "float32"),
            "score": ([p.batches, p.classes, p.boxes], "float32"),
            "most": ([1], "int64"),
            "overlap": ([1], "float32"),
            "least": ([1], "float32"),
            "selected": ([self.groups * p.limit, 3], "int64"),
            "number": ([1], "int64"),
        }
        self._memory: dict[str, tuple[Any, list[Expr]]] = {}
        for name, (shape, dtype) in shapes.items():
            extents = [int64(extent) for extent in shape]
            self._memory[name] = function.argument(name, extents, dtype), extents

    def allocate(self) -> None:
        """Memory between the launches."""
        for name, count, dtype in (
            ("alive", self.groups * self.problem.boxes, "int8"),
            ("taken", self.groups * self.problem.limit, "int32"),
            ("counts", self.groups, "int32"),
            ("scores", self.groups * _WARPS, "float32"),
            ("places", self.groups * _WARPS, "int32"),
        ):
            extents = [int64(max(count, 1))]
            self._memory[name] = T.alloc_buffer(extents, dtype, scope="global"), extents

    def _open(self, *names: str) -> list[Any]:
        return [flat(*self._memory[name]) for name in names]

    def take(self) -> None:
        """The boxes of each class, best first, and how many they are."""
        p = self.problem
        with launch(self.groups, _THREADS) as (group, thread):
            box, score, most, overlap, least, alive, taken, counts, *met = self._open(
                "box", "score", "most", "overlap", "least", "alive", "taken", "counts", "scores", "places"
            )
            last, count, goes_on = register("int32", 1), register("int32", 1), register("int32", 1)
            none = tirx.const(-1, "int32")
            T.buffer_store(last, none, [_ZERO])
            T.buffer_store(count, tirx.const(0, "int32"), [_ZERO])
            wanted = T.min(most[_ZERO], int64(p.limit))
            T.buffer_store(goes_on, tirx.Cast("int32", wanted > 0), [_ZERO])
            with T.While(goes_on[_ZERO] != 0):
                best, where = register("float32", 1), register("int32", 1)
                T.buffer_store(best, tirx.const(float("-inf"), "float32"), [_ZERO])
                T.buffer_store(where, none, [_ZERO])
                with T.serial(int64(-(-p.boxes // _THREADS))) as step:
                    i = step * _THREADS + thread
                    with T.If(i < p.boxes), T.Then():
                        self._visit(i, group, (box, score, overlap, least, alive), last, count, best, where)
                T.buffer_store(last, self._join((met[0], met[1]), group, thread, best, where), [_ZERO])
                with T.If(last[_ZERO] >= 0), T.Then():
                    with T.If(tirx.EQ(thread, _ZERO)), T.Then():
                        at = group * p.limit + tirx.Cast("int64", count[_ZERO])
                        T.buffer_store(taken, last[_ZERO], [at])
                    T.buffer_store(count, count[_ZERO] + 1, [_ZERO])
                is_more = tirx.all(last[_ZERO] >= 0, tirx.Cast("int64", count[_ZERO]) < wanted)
                T.buffer_store(goes_on, tirx.Cast("int32", is_more), [_ZERO])
            with T.If(tirx.EQ(thread, _ZERO)), T.Then():
                T.buffer_store(counts, count[_ZERO], [group])

    def _visit(
        self, i: Expr, group: Expr, memory: tuple[Any, ...], last: Any, count: Any, best: Any, where: Any
    ) -> None:
        """A box in a round: dropped where it overlaps the last one taken, or else perhaps the best."""
        box, score, overlap, least, alive = memory
        p, here = self.problem, group * self.problem.boxes + i
        image = group // p.classes * p.boxes
        stays, own = register("int32", 1), register("float32", 1)
        T.buffer_store(own, score[here], [_ZERO])
        with T.If(last[_ZERO] < 0):
            with T.Then():  # the first round
                T.buffer_store(stays, tirx.Cast("int32", own[_ZERO] > least[_ZERO]), [_ZERO])
                T.buffer_store(alive, tirx.Cast("int8", stays[_ZERO]), [here])
            with T.Else():
                T.buffer_store(stays, tirx.Cast("int32", alive[here]), [_ZERO])
                with T.If(stays[_ZERO] != 0), T.Then():
                    one = self._corners(box, image + i)
                    other = self._corners(box, image + tirx.Cast("int64", last[_ZERO]))
                    is_last = tirx.EQ(i, tirx.Cast("int64", last[_ZERO]))
                    with T.If(tirx.any(is_last, _overlaps(one, other, overlap[_ZERO]))), T.Then():
                        T.buffer_store(stays, tirx.const(0, "int32"), [_ZERO])
                        T.buffer_store(alive, tirx.const(0, "int8"), [here])
        is_better = tirx.any(where[_ZERO] < 0, own[_ZERO] > best[_ZERO])
        with T.If(tirx.all(stays[_ZERO] != 0, is_better)), T.Then():
            T.buffer_store(best, own[_ZERO], [_ZERO])
            T.buffer_store(where, tirx.Cast("int32", i), [_ZERO])

    def _corners(self, box: Any, number: Expr) -> list[Expr]:
        """The corners of a box in registers: least and greatest along both axes."""
        given = [box[number * 4 + d] for d in range(4)]
        if self.problem.is_center:
            half = tirx.const(2, "float32")
            values = [given[d] - given[d + 2] / half for d in range(2)]
            values += [given[d] + given[d + 2] / half for d in range(2)]
        else:
            values = [T.min(given[d], given[d + 2]) for d in range(2)] + [
                T.max(given[d], given[d + 2]) for d in range(2)
            ]
        corners = register("float32", 4)
        for d, value in enumerate(values):
            T.buffer_store(corners, value, [int64(d)])
        return [corners[int64(d)] for d in range(4)]

    def _join(self, memory: tuple[Any, Any], group: Expr, thread: Expr, best: Any, where: Any) -> Expr:
        """Where the best of all threads is, the first of equal ones.

        Warps meet in memory of the device: in loops whose end only the run knows, TVM puts no barriers around accesses
        of shared memory, and refuses them.
        """
        distance = WARP
        while distance > 1:
            distance //= 2
            self._take_better(best, where, from_below(best, distance), from_below(where, distance))
        first = group * _WARPS
        with T.If(tirx.EQ(thread % WARP, _ZERO)), T.Then():
            for part, own in zip(memory, (best, where), strict=True):
                T.buffer_store(part, own[_ZERO], [first + thread // WARP])
        sync()
        for part, own in zip(memory, (best, where), strict=True):
            T.buffer_store(own, part[first], [_ZERO])
        for warp in range(1, _WARPS):
            self._take_better(best, where, *(part[first + warp] for part in memory))
        sync()
        return where[_ZERO]

    def _take_better(self, best: Any, where: Any, score: Expr, place: Expr) -> None:
        """Keep the better one of two boxes, which may both be none."""
        other_score, other = register("float32", 1), register("int32", 1)
        T.buffer_store(other_score, score, [_ZERO])
        T.buffer_store(other, place, [_ZERO])
        is_first = tirx.all(tirx.EQ(other_score[_ZERO], best[_ZERO]), other[_ZERO] < where[_ZERO])
        is_better = tirx.any(where[_ZERO] < 0, other_score[_ZERO] > best[_ZERO], is_first)
        with T.If(tirx.all(other[_ZERO] >= 0, is_better)), T.Then():
            T.buffer_store(best, other_score[_ZERO], [_ZERO])
            T.buffer_store(where, other[_ZERO], [_ZERO])

    def write(self) -> None:
        """The places of all boxes taken, class after class, and their number."""
        p = self.problem
        with launch(self.groups, _THREADS) as (group, thread):
            taken, counts, selected, number = self._open("taken", "counts", "selected", "number")
            before = register("int64", 1)
            T.buffer_store(before, _ZERO, [_ZERO])
            with T.serial(group) as earlier:
                T.buffer_store(before, before[_ZERO] + tirx.Cast("int64", counts[earlier]), [_ZERO])
            own = tirx.Cast("int64", counts[group])
            with T.serial(int64(-(-p.limit // _THREADS))) as step:
                k = step * _THREADS + thread
                with T.If(k < own), T.Then():
                    values = group // p.classes, group % p.classes, tirx.Cast("int64", taken[group * p.limit + k])
                    for d, value in enumerate(values):
                        T.buffer_store(selected, value, [(before[_ZERO] + k) * 3 + d])
            with T.If(tirx.all(tirx.EQ(group, int64(self.groups - 1)), tirx.EQ(thread, _ZERO))), T.Then():
                T.buffer_store(number, before[_ZERO] + own, [_ZERO])


def _overlaps(one: list[Expr], other: list[Expr], most: Expr) -> Expr:
    """Whether two boxes share more of their union than `most`."""
    high = T.min(one[2], other[2]) - T.max(one[0], other[0])
    wide = T.min(one[3], other[3]) - T.max(one[1], other[1])
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    share = high * wide / (areas[0] + areas[1] - high * wide)
    zero = tirx.const(0, "float32")
    return tirx.all(high > zero, wide > zero, share > most)
