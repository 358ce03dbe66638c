"""Non-maximum suppression on GPUs: a block goes through the boxes of one class of one image.

A round drops the boxes that overlap the one taken last and finds the best of those left, in one pass over the boxes by
all threads of the block. Each thread has boxes of its own, so that no two write what both read. How many boxes the
classes before have taken is known when all are done: a second launch writes the result.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, ceil_div, int64
from ...nms import NmsMemory, NmsProblem, area_of, corners_of, overlaps
from .lanes import register
from .launch import launch, sync
from .reduction import from_below

_THREADS = 256
_WARPS = _THREADS // WARP
_ZERO = int64(0)


def nms_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The PrimFunc for a GPU, in two launches.

    Parameters
    ----------
    func : PrimFunc
        With the attribute `NMS` and the parameters of `NmsMemory`.
    """
    problem = NmsProblem.of(func)
    function = Function("non_max_suppression")
    with function:
        kernel = _Kernel(NmsMemory(function, problem), problem.is_center)
        with function.body():
            kernel.allocate()
            kernel.take()
            kernel.write()
    made = function.result
    return tirx.PrimFunc(made.params, made.body, func.ret_type, func.attrs, func.span).with_attr(
        "tirx.is_scheduled", True
    )


class _Kernel:
    def __init__(self, memory: NmsMemory, is_center: bool) -> None:
        self._memory, self._is_center = memory, is_center
        self._open = memory.open

    def allocate(self) -> None:
        """Memory between the launches."""
        m = self._memory
        for name, count, dtype in (
            ("alive", m.groups * m.boxes, "int8"),
            ("taken", m.groups * m.limit, "int32"),
            ("counts", m.groups, "int32"),
            ("scores", m.groups * _WARPS, "float32"),
            ("places", m.groups * _WARPS, "int32"),
        ):
            m.allocate(name, count, dtype)

    def _image(self, group: Expr) -> Expr:
        classes = self._memory.classes
        # There are no groups where there are no classes, but a block is launched.
        return group // (max(classes, 1) if isinstance(classes, int) else T.max(classes, int64(1)))

    def take(self) -> None:
        """The boxes of each class, best first, and how many they are."""
        m = self._memory
        with launch(m.groups, _THREADS) as (group, thread):
            box, score, most, overlap, least, alive, taken, counts, *met = self._open(
                "box", "score", "most", "overlap", "least", "alive", "taken", "counts", "scores", "places"
            )
            last, count, goes_on = register("int32", 1), register("int32", 1), register("int32", 1)
            none = tirx.const(-1, "int32")
            T.buffer_store(last, none, [_ZERO])
            T.buffer_store(count, tirx.const(0, "int32"), [_ZERO])
            wanted = T.min(most[_ZERO], int64(m.limit))
            T.buffer_store(goes_on, tirx.Cast("int32", tirx.all(wanted > 0, group < m.groups)), [_ZERO])
            with T.While(goes_on[_ZERO] != 0):
                best, where = register("float32", 1), register("int32", 1)
                T.buffer_store(best, tirx.const(float("-inf"), "float32"), [_ZERO])
                T.buffer_store(where, none, [_ZERO])
                with T.serial(int64(ceil_div(m.boxes, _THREADS))) as step:
                    i = step * _THREADS + thread
                    with T.If(i < m.boxes), T.Then():
                        self._visit(i, group, (box, score, overlap, least, alive), last, count, best, where)
                T.buffer_store(last, self._join((met[0], met[1]), group, thread, best, where), [_ZERO])
                with T.If(last[_ZERO] >= 0), T.Then():
                    with T.If(tirx.EQ(thread, _ZERO)), T.Then():
                        at = group * m.limit + tirx.Cast("int64", count[_ZERO])
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
        m = self._memory
        here = group * m.boxes + i
        image = self._image(group) * m.boxes
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
                    with (
                        T.If(tirx.any(is_last, overlaps(one, other, overlap[_ZERO], tirx.const(0, "float32")))),
                        T.Then(),
                    ):
                        T.buffer_store(stays, tirx.const(0, "int32"), [_ZERO])
                        T.buffer_store(alive, tirx.const(0, "int8"), [here])
        is_better = tirx.any(where[_ZERO] < 0, own[_ZERO] > best[_ZERO])
        with T.If(tirx.all(stays[_ZERO] != 0, is_better)), T.Then():
            T.buffer_store(best, own[_ZERO], [_ZERO])
            T.buffer_store(where, tirx.Cast("int32", i), [_ZERO])

    def _corners(self, box: Any, number: Expr) -> list[Expr]:
        """Corners and area of a box in registers."""
        corners = register("float32", 5)
        for d, value in enumerate(corners_of([box[number * 4 + d] for d in range(4)], self._is_center)):
            T.buffer_store(corners, value, [int64(d)])
        values = [corners[int64(d)] for d in range(5)]
        T.buffer_store(corners, area_of(values), [int64(4)])
        return values

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
        m = self._memory
        with launch(m.groups, _THREADS) as (group, thread):
            taken, counts, selected, number = self._open("taken", "counts", "selected", "number")
            before = register("int64", 1)
            T.buffer_store(before, _ZERO, [_ZERO])
            with T.serial(group) as earlier:
                T.buffer_store(before, before[_ZERO] + tirx.Cast("int64", counts[earlier]), [_ZERO])
            own = tirx.Cast("int64", counts[group])
            with T.serial(int64(ceil_div(m.limit, _THREADS))) as step:
                k = step * _THREADS + thread
                with T.If(k < own), T.Then():
                    values = (
                        self._image(group),
                        group - self._image(group) * m.classes,
                        tirx.Cast("int64", taken[group * m.limit + k]),
                    )
                    for d, value in enumerate(values):
                        T.buffer_store(selected, value, [(before[_ZERO] + k) * 3 + d])
            with T.If(tirx.all(group + 1 >= m.groups, tirx.EQ(thread, _ZERO))), T.Then():
                T.buffer_store(number, before[_ZERO] + own, [_ZERO])
