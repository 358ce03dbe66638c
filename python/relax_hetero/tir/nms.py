"""Non-maximum suppression: the best boxes of each class, without those that overlap a better one of the class.

The CPU kernel pops the boxes of a class from a heap, best first: most calls want few of many. Each is compared with the
boxes selected before, a vector of them at a time. Classes are independent and share the cores; each writes to a segment
of its own, and the segments are compacted at the end.

The GPU kernel of the same problem is in `relax_hetero.tir.cuda.loops.cuda_nms`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.bounds import BOUNDED
from .core.builder import Expr, Function, Registers, ceil_div, flat, int64, loop, materialize, minimum, when

NMS = "relax_hetero.suppression"
"""On a PrimFunc that computes a non-maximum suppression: its `NmsProblem` as JSON."""

_LANES = 8
_BOX_FIELDS = 5  # numbers of a selected box: its corners and its area


@dataclass(frozen=True)
class NmsProblem:
    """A suppression of boxes ``(batches, boxes, 4)`` by scores ``(batches, classes, boxes)``."""

    batches: Dim
    classes: Dim
    boxes: Dim
    max_boxes: int | None  # maximum number of boxes that a class selects; None if it may select all
    is_center: bool  # whether boxes are stored as centers and sizes, else as opposite corners

    @property
    def text(self) -> str:
        """The problem as JSON, the value of the attribute."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> NmsProblem:
        """Problem of a PrimFunc with the attribute."""
        return cls(**json.loads(str(func.attrs[NMS])))


class NmsMemory:
    """Extents of a suppression, and the memory of its parameters.

    These are boxes, scores, three tensors of one number (maximum boxes per class, the overlap that drops a box, the
    minimum score), the indices ``(batches * classes * limit, 3)`` of the selected boxes, and their number.
    """

    def __init__(self, function: Function, problem: NmsProblem) -> None:
        self.batches, self.classes, self.boxes = map(function.size, (problem.batches, problem.classes, problem.boxes))
        self.groups = self.batches * self.classes  # number of classes in all images
        # Capacity of each class's segment of the results.
        self.limit = self.boxes if problem.max_boxes is None else minimum(self.boxes, problem.max_boxes)
        shapes: dict[str, tuple[list[Expr], str]] = {
            "box": ([self.batches, self.boxes, 4], "float32"),
            "score": ([self.batches, self.classes, self.boxes], "float32"),
            "most": ([1], "int64"),
            "overlap": ([1], "float32"),
            "least": ([1], "float32"),
            "selected": ([self.groups * self.limit, 3], "int64"),
            "number": ([1], "int64"),
        }
        self._memory: dict[str, tuple[Any, list[Expr]]] = {}
        for name, (shape, dtype) in shapes.items():
            extents = [int64(size) for size in shape]
            self._memory[name] = function.argument(name, extents, dtype), extents

    def allocate(self, name: str, count: Expr, dtype: str) -> None:
        """Allocate scratch memory of the kernel."""
        extents = [int64(max(count, 1) if isinstance(count, int) else T.max(count, int64(1)))]
        self._memory[name] = T.alloc_buffer(extents, dtype, scope="global"), extents

    def open(self, *names: str) -> list[Any]:
        """The elements of parameters and memory, each as one dimension."""
        return [flat(*self._memory[name]) for name in names]


def corners_of(box: list[Expr], is_center: bool) -> list[Expr]:
    """The corners of a box, minima and maxima along both axes, from its four numbers."""
    if is_center:
        two = tirx.const(2, "float32")
        return [box[d] - box[d + 2] / two for d in range(2)] + [box[d] + box[d + 2] / two for d in range(2)]
    return [T.min(box[d], box[d + 2]) for d in range(2)] + [T.max(box[d], box[d + 2]) for d in range(2)]


def overlaps(one: list[Expr], other: list[Expr], max_overlap: Expr, zero: Expr) -> Expr:
    """True if the intersection over union of two boxes exceeds `max_overlap`; `zero` has their type."""
    high = T.min(one[2], other[2]) - T.max(one[0], other[0])
    wide = T.min(one[3], other[3]) - T.max(one[1], other[1])
    iou = high * wide / (one[4] + other[4] - high * wide)
    return T.bitwise_and(T.bitwise_and(high > zero, wide > zero), iou > max_overlap)


def area_of(corners: list[Expr]) -> Expr:
    """The area of a box."""
    return (corners[2] - corners[0]) * (corners[3] - corners[1])


def nms_kernel(problem: NmsProblem) -> tirx.PrimFunc:
    """The kernel for CPUs, with the attribute; its parameters are those of `NmsMemory`."""
    with Function("non_max_suppression") as function:
        memory = NmsMemory(function, problem)
        with function.body():
            kernel = _Kernel(memory, problem.is_center)
            is_parallel = not isinstance(memory.groups, int) or memory.groups > 1
            with loop(memory.groups, parallel=is_parallel) as group:
                kernel.select(group)
            kernel.compact()
    return function.result.with_attrs({NMS: problem.text, BOUNDED: True})


class _Kernel:
    """Statements over scalars of memory, which LLVM makes registers."""

    def __init__(self, memory: NmsMemory, is_center: bool) -> None:
        self._memory, self._is_center = memory, is_center
        memory.allocate("counts", memory.groups, "int64")
        # Fields of a class's selected boxes: whole vectors, and one more, which is zeros where the last one is full.
        self._pitch = ceil_div(memory.limit, _LANES) * _LANES + _LANES
        memory.allocate("order", memory.groups * memory.boxes, "int32")
        memory.allocate("taken", memory.groups * self._pitch * _BOX_FIELDS, "float32")
        self._box, self._score, self._order, self._selected_boxes = memory.open("box", "score", "order", "taken")
        self._selected, self._counts = memory.open("selected", "counts")

    def select(self, group: Expr) -> None:
        """Select the boxes of a class, best first, and count them."""
        m = self._memory
        most, overlap = m.open("most", "overlap")
        self._first_score, self._first_order = materialize(group * m.boxes), materialize(group * m.boxes)
        self._first_selected = materialize(group * self._pitch * _BOX_FIELDS)
        heap_size = Registers(1, "int64", 1)
        heap_size[0] = int64(0)
        self._gather(heap_size)
        self._make_heap(heap_size)
        count, goes_on = Registers(1, "int64", 1), Registers(1, "bool", 1)
        count[0] = int64(0)
        limit = materialize(T.min(most[int64(0)], int64(m.limit)))
        goes_on[0] = tirx.all(heap_size[0] > 0, limit > 0)
        image = materialize(T.floordiv(group, int64(m.classes)))
        with T.While(goes_on[0]):
            best = self._pop(heap_size)
            corners = self._corners(materialize(image * m.boxes + best))
            with when(tirx.Not(self._is_dropped(corners, overlap[int64(0)], count[0]))):
                self._append(corners, count[0])
                offset = materialize((group * m.limit + count[0]) * 3)
                for d, value in enumerate((image, group - image * m.classes, best)):
                    T.buffer_store(self._selected, value, [offset + d])
                count[0] = count[0] + 1
            goes_on[0] = tirx.all(heap_size[0] > 0, count[0] < limit)
        T.buffer_store(self._counts, count[0], [group])

    def _gather(self, heap_size: Registers) -> None:
        """Collect the boxes whose score is above the minimum."""
        (min_score,) = self._memory.open("least")
        with loop(self._memory.boxes) as i:
            with when(self._score[self._first_score + i] > min_score[int64(0)]):
                T.buffer_store(self._order, tirx.Cast("int32", i), [self._first_order + heap_size[0]])
                heap_size[0] = heap_size[0] + 1

    def _make_heap(self, heap_size: Registers) -> None:
        half = materialize(T.floordiv(heap_size[0], int64(2)))
        with loop(half) as i:
            self._sink(materialize(half - 1 - i), heap_size[0])

    def _pop(self, heap_size: Registers) -> Expr:
        """Remove the best box from the heap and return its number."""
        order = self._order
        best = materialize(tirx.Cast("int64", order[self._first_order]))
        heap_size[0] = heap_size[0] - 1
        T.buffer_store(order, order[self._first_order + heap_size[0]], [self._first_order])
        self._sink(int64(0), heap_size[0])
        return best

    def _sink(self, start: Expr, count: Expr) -> None:
        """Move the box at an index of the heap below all that are better."""
        order = self._order
        parent, goes_on, child = Registers(1, "int64", 1), Registers(1, "bool", 1), Registers(1, "int64", 1)
        parent[0] = start
        goes_on[0] = 2 * start + 1 < count
        first = self._first_order
        with T.While(goes_on[0]):
            child[0] = 2 * parent[0] + 1
            with (
                when(child[0] + 1 < count),
                when(self._is_better(order[first + child[0] + 1], order[first + child[0]])),
            ):
                child[0] = child[0] + 1
            goes_on[0] = self._is_better(order[first + child[0]], order[first + parent[0]])
            with when(goes_on[0]):
                lower = Registers(1, "int32", 1)
                lower[0] = order[first + parent[0]]
                T.buffer_store(order, order[first + child[0]], [first + parent[0]])
                T.buffer_store(order, lower[0], [first + child[0]])
                parent[0] = child[0]
                goes_on[0] = 2 * parent[0] + 1 < count

    def _is_better(self, one: Expr, other: Expr) -> Expr:
        """Return whether a box has the higher score; the first of equal ones is better."""
        score, other_score = (self._score[self._first_score + tirx.Cast("int64", box)] for box in (one, other))
        return T.bitwise_or(score > other_score, T.bitwise_and(tirx.EQ(score, other_score), one < other))

    def _corners(self, number: Expr) -> list[Expr]:
        """Corners and area of a box."""
        box = [T.bind(self._box[number * 4 + d]) for d in range(4)]
        corners = [T.bind(value) for value in corners_of(box, self._is_center)]
        return [*corners, T.bind(area_of(corners))]

    def _append(self, corners: list[Expr], count: Expr) -> None:
        """Append a box; the rest of a vector that it begins is zeros, which overlap nothing."""
        for field, value in enumerate(corners):
            begin = self._first_selected + field * self._pitch + count
            with when(tirx.EQ(T.floormod(count, int64(_LANES)), int64(0))):
                T.buffer_store(
                    self._selected_boxes, T.broadcast(tirx.const(0, "float32"), _LANES), [T.ramp(begin, 1, _LANES)]
                )
            T.buffer_store(self._selected_boxes, value, [begin])

    def _is_dropped(self, corners: list[Expr], max_overlap: Expr, count: Expr) -> Expr:
        """Return whether a selected box overlaps a box."""
        any_overlap = Registers(1, "int32", _LANES)
        zero = T.broadcast(tirx.const(0, "float32"), _LANES)
        any_overlap[0] = T.broadcast(tirx.const(0, "int32"), _LANES)
        box = [T.broadcast(value, _LANES) for value in corners]
        with loop(materialize(ceil_div(count, _LANES))) as vector:
            begin = self._first_selected + vector * _LANES
            selected = [
                T.bind(self._selected_boxes[T.ramp(begin + field * self._pitch, 1, _LANES)])
                for field in range(_BOX_FIELDS)
            ]
            is_overlap = overlaps(box, selected, T.broadcast(max_overlap, _LANES), zero)
            any_overlap[0] = T.bitwise_or(any_overlap[0], tirx.Cast(f"int32x{_LANES}", is_overlap))
        result = Registers(1, "int32", 1)
        result[0] = tirx.const(0, "int32")
        for lane in range(_LANES):
            result[0] = T.bitwise_or(result[0], T.Shuffle([any_overlap[0]], [lane]))
        return tirx.NE(result[0], tirx.const(0, "int32"))

    def compact(self) -> None:
        """Move the results of the classes together without gaps, and store their number."""
        m = self._memory
        (number,) = m.open("number")
        counts, selected = self._counts, self._selected
        total = Registers(1, "int64", 1)
        total[0] = int64(0)
        with loop(m.groups) as group:
            begin = materialize(group * m.limit)
            with loop(materialize(counts[group])) as k, loop(3) as d:
                T.buffer_store(selected, selected[(begin + k) * 3 + d], [(total[0] + k) * 3 + d])
            total[0] = total[0] + counts[group]
        T.buffer_store(number, total[0], [int64(0)])
