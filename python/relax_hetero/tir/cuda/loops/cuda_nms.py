"""Non-maximum suppression: one block per image and class.

In each round, the block drops the boxes that overlap the box selected last, and finds the best remaining one, in one
pass over all boxes. Each box belongs to one thread, so there are no data races. The output offset of a class depends on
the number of boxes that earlier classes have selected: a second launch writes the result.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, ceil_div, int64
from ...nms import NmsMemory, NmsProblem, area_of, corners_of, overlaps
from ..core.dialect import has_ptx
from .lanes import register
from .launch import launch, scheduled_as, sync
from .reduction import from_below

_THREADS = 256
_ZERO = int64(0)


def nms_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """GPU kernel of a non-maximum suppression, in two launches.

    Parameters
    ----------
    func : PrimFunc
        PrimFunc with the attribute `NMS` and the parameters of `NmsMemory`.
    """
    problem = NmsProblem.of(func)
    function = Function("non_max_suppression")
    with function:
        kernel = _Kernel(NmsMemory(function, problem), problem.is_center)
        with function.body():
            kernel.allocate()
            kernel.select()
            kernel.write()
    return scheduled_as(func, function.result)


class _Kernel:
    def __init__(self, memory: NmsMemory, is_center: bool) -> None:
        self._memory, self._is_center = memory, is_center
        self._group_threads = WARP if has_ptx() else 1
        self._groups = _THREADS // self._group_threads
        self._open = memory.open

    def allocate(self) -> None:
        """Allocate the buffers between the launches."""
        m = self._memory
        for name, count, dtype in (
            ("alive", m.groups * m.boxes, "int8"),
            ("taken", m.groups * m.limit, "int32"),
            ("counts", m.groups, "int32"),
            ("scores", m.groups * self._groups, "float32"),
            ("places", m.groups * self._groups, "int32"),
        ):
            m.allocate(name, count, dtype)

    def _image(self, group: Expr) -> Expr:
        classes = self._memory.classes
        # Without classes there are no groups, but one block is launched.
        return group // (max(classes, 1) if isinstance(classes, int) else T.max(classes, int64(1)))

    def select(self) -> None:
        """Write the launch that selects the boxes of each class, best first, and counts them."""
        m = self._memory
        with launch(m.groups, _THREADS) as (group, thread):
            box, score, max_selected, overlap, min_score, alive, boxes, counts, *maxima = self._open(
                "box", "score", "most", "overlap", "least", "alive", "taken", "counts", "scores", "places"
            )
            last, count, is_running = register("int32", 1), register("int32", 1), register("int32", 1)
            none = tirx.const(-1, "int32")
            T.buffer_store(last, none, [_ZERO])
            T.buffer_store(count, tirx.const(0, "int32"), [_ZERO])
            limit = T.min(max_selected[_ZERO], int64(m.limit))
            T.buffer_store(is_running, tirx.Cast("int32", tirx.all(limit > 0, group < m.groups)), [_ZERO])
            with T.While(is_running[_ZERO] != 0):
                best, winner = register("float32", 1), register("int32", 1)
                T.buffer_store(best, tirx.const(float("-inf"), "float32"), [_ZERO])
                T.buffer_store(winner, none, [_ZERO])
                with T.serial(int64(ceil_div(m.boxes, _THREADS))) as iteration:
                    i = iteration * _THREADS + thread
                    with T.If(i < m.boxes), T.Then():
                        self._visit_box(i, group, (box, score, overlap, min_score, alive), last, count, best, winner)
                T.buffer_store(last, self._best_of_block((maxima[0], maxima[1]), group, thread, best, winner), [_ZERO])
                with T.If(last[_ZERO] >= 0), T.Then():
                    with T.If(tirx.EQ(thread, _ZERO)), T.Then():
                        index = group * m.limit + tirx.Cast("int64", count[_ZERO])
                        T.buffer_store(boxes, last[_ZERO], [index])
                    T.buffer_store(count, count[_ZERO] + 1, [_ZERO])
                is_more = tirx.all(last[_ZERO] >= 0, tirx.Cast("int64", count[_ZERO]) < limit)
                T.buffer_store(is_running, tirx.Cast("int32", is_more), [_ZERO])
            with T.If(tirx.EQ(thread, _ZERO)), T.Then():
                T.buffer_store(counts, count[_ZERO], [group])

    def _visit_box(
        self, i: Expr, group: Expr, memory: tuple[Any, ...], last: Any, count: Any, best: Any, best_index: Any
    ) -> None:
        """Process a box in a round: drop it if it overlaps the box selected last, else compare it with the best."""
        box, score, overlap, min_score, alive = memory
        m = self._memory
        index = group * m.boxes + i
        image = self._image(group) * m.boxes
        is_alive, own_score = register("int32", 1), register("float32", 1)
        T.buffer_store(own_score, score[index], [_ZERO])
        with T.If(last[_ZERO] < 0):
            with T.Then():  # the first round
                T.buffer_store(is_alive, tirx.Cast("int32", own_score[_ZERO] > min_score[_ZERO]), [_ZERO])
                T.buffer_store(alive, tirx.Cast("int8", is_alive[_ZERO]), [index])
            with T.Else():
                T.buffer_store(is_alive, tirx.Cast("int32", alive[index]), [_ZERO])
                with T.If(is_alive[_ZERO] != 0), T.Then():
                    corners = self._corners(box, image + i)
                    last_box = self._corners(box, image + tirx.Cast("int64", last[_ZERO]))
                    is_last = tirx.EQ(i, tirx.Cast("int64", last[_ZERO]))
                    with (
                        T.If(tirx.any(is_last, overlaps(corners, last_box, overlap[_ZERO], tirx.const(0, "float32")))),
                        T.Then(),
                    ):
                        T.buffer_store(is_alive, tirx.const(0, "int32"), [_ZERO])
                        T.buffer_store(alive, tirx.const(0, "int8"), [index])
        is_better = tirx.any(best_index[_ZERO] < 0, own_score[_ZERO] > best[_ZERO])
        with T.If(tirx.all(is_alive[_ZERO] != 0, is_better)), T.Then():
            T.buffer_store(best, own_score[_ZERO], [_ZERO])
            T.buffer_store(best_index, tirx.Cast("int32", i), [_ZERO])

    def _corners(self, box: Any, number: Expr) -> list[Expr]:
        """Corners and area of a box in registers."""
        corners = register("float32", 5)
        for d, value in enumerate(corners_of([box[number * 4 + d] for d in range(4)], self._is_center)):
            T.buffer_store(corners, value, [int64(d)])
        values = [corners[int64(d)] for d in range(5)]
        T.buffer_store(corners, area_of(values), [int64(4)])
        return values

    def _best_of_block(self, memory: tuple[Any, Any], group: Expr, thread: Expr, best: Any, best_index: Any) -> Expr:
        """Index of the best box of all threads, the first of equal ones.

        Groups of threads exchange their results in global memory: TVM cannot place barriers for shared memory in a
        while loop, and rejects it.
        """
        distance = self._group_threads
        while distance > 1:
            distance //= 2
            self._keep_better(best, best_index, from_below(best, distance), from_below(best_index, distance))
        first = group * self._groups
        with T.If(tirx.EQ(thread % self._group_threads, _ZERO)), T.Then():
            for part, own in zip(memory, (best, best_index), strict=True):
                T.buffer_store(part, own[_ZERO], [first + thread // self._group_threads])
        sync()
        for part, own in zip(memory, (best, best_index), strict=True):
            T.buffer_store(own, part[first], [_ZERO])
        with T.serial(int64(self._groups - 1)) as other:
            self._keep_better(best, best_index, *(part[first + 1 + other] for part in memory))
        sync()
        return best_index[_ZERO]

    def _keep_better(self, best: Any, best_index: Any, score: Expr, index: Expr) -> None:
        """Keep the better of two boxes, of which both may be missing (-1)."""
        other_score, other_index = register("float32", 1), register("int32", 1)
        T.buffer_store(other_score, score, [_ZERO])
        T.buffer_store(other_index, index, [_ZERO])
        is_first = tirx.all(tirx.EQ(other_score[_ZERO], best[_ZERO]), other_index[_ZERO] < best_index[_ZERO])
        is_better = tirx.any(best_index[_ZERO] < 0, other_score[_ZERO] > best[_ZERO], is_first)
        with T.If(tirx.all(other_index[_ZERO] >= 0, is_better)), T.Then():
            T.buffer_store(best, other_score[_ZERO], [_ZERO])
            T.buffer_store(best_index, other_index[_ZERO], [_ZERO])

    def write(self) -> None:
        """Write the launch that stores the indices of selected boxes, class by class, and their number."""
        m = self._memory
        with launch(m.groups, _THREADS) as (group, thread):
            boxes, counts, selected, number = self._open("taken", "counts", "selected", "number")
            offset = register("int64", 1)
            T.buffer_store(offset, _ZERO, [_ZERO])
            with T.serial(group) as earlier:
                T.buffer_store(offset, offset[_ZERO] + tirx.Cast("int64", counts[earlier]), [_ZERO])
            count = tirx.Cast("int64", counts[group])
            with T.serial(int64(ceil_div(m.limit, _THREADS))) as iteration:
                k = iteration * _THREADS + thread
                with T.If(k < count), T.Then():
                    values = (
                        self._image(group),
                        group - self._image(group) * m.classes,
                        tirx.Cast("int64", boxes[group * m.limit + k]),
                    )
                    for d, value in enumerate(values):
                        T.buffer_store(selected, value, [(offset[_ZERO] + k) * 3 + d])
            with T.If(tirx.all(group + 1 >= m.groups, tirx.EQ(thread, _ZERO))), T.Then():
                T.buffer_store(number, offset[_ZERO] + count, [_ZERO])
