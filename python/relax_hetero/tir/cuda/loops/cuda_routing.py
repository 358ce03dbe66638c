"""Routing of a mixture of experts on GPUs: a warp for each row, whose lanes hold the scores in registers."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import ALL_LANES, WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, materialize, when
from ...routing import RoutingProblem, RoutingTensors
from ..core import ptx
from ..core.dialect import has_ptx
from ..core.launch import local
from ..tile.register_tile import add, reduce_lanes
from .launch import launch, scheduled_as

_LOWEST = tirx.const(-math.inf, "float32")
_NO_EXPERT = (1 << 31) - 1
_REDUX_CAPABILITY = 80  # compute capability from which a warp reduces integers by one instruction


def routing_kernel(func: tirx.PrimFunc, gpu: GpuTarget) -> tirx.PrimFunc:
    """GPU kernel of a PrimFunc with the attribute `ROUTING`."""
    problem = RoutingProblem.of(func)
    warps = 4 if has_ptx() else 1  # all threads of a block take part in shuffles
    function = Function("routing", registers="local")
    with function:
        tensors = RoutingTensors(function, problem)
        with function.body(), launch(ceil_div(tensors.rows, warps), warps * WARP) as (block, thread):
            tensors.open()
            row = materialize(block * warps + thread // WARP)
            with when(row < tensors.rows):
                _Route(tensors, problem, row, T.bind(T.Cast("int32", thread % WARP)), gpu).emit()
    return scheduled_as(func, function.result)


class _Route:
    """Writer of the routing of a row by a warp, whose lane i gets the experts i, i + 32, ... and the chosen ones."""

    def __init__(self, tensors: RoutingTensors, problem: RoutingProblem, row: Expr, lane: Expr, gpu: GpuTarget) -> None:
        self._tensors, self._problem, self._row, self._lane = tensors, problem, row, lane
        self._numbers = [lane + i * WARP for i in range(ceil_div(problem.experts, WARP))]
        self._values = local(len(self._numbers), "float32")
        self._total, self._highest = local(1, "float32"), local(1, "float32")
        reduces = has_ptx() and gpu.capability >= _REDUX_CAPABILITY
        self._best = (_ReducedBest if reduces else _Best)(lane, self._values, problem.experts)

    def emit(self) -> None:
        """Write the code."""
        problem, values = self._problem, self._values
        for i, expert in enumerate(self._numbers):
            score = self._score(T.min(expert, problem.experts - 1))
            T.buffer_store(values, T.Select(expert < problem.experts, score, _LOWEST), [i])
        # The first score that is chosen is the highest one.
        if problem.is_softmax and (problem.needs_total or problem.has_groups):
            self._find_highest()
        if problem.needs_total:
            T.buffer_store(self._total, T.float32(0), [0])
            for i in range(len(self._numbers)):
                T.buffer_store(self._total, self._total[0] + problem.power(values[i], self._highest[0]), [0])
            reduce_lanes(self._total, 0, add)
        if problem.needs_probabilities:
            for i, expert in enumerate(self._numbers):
                value = problem.power(values[i], self._highest[0])
                value = value / self._total[0] if problem.is_softmax else value
                value = value + self._tensors.bias[T.min(expert, problem.experts - 1)] if problem.has_bias else value
                T.buffer_store(values, T.Select(expert < problem.experts, value, _LOWEST), [i])
        if problem.has_groups:
            _keep_groups(self._best, problem, self._numbers)
        self._choose()

    def _score(self, expert: Expr) -> Expr:
        return self._tensors.scores[self._row * self._problem.experts + expert]

    def _find_highest(self) -> None:
        T.buffer_store(self._highest, self._values[0], [0])
        for i in range(1, len(self._numbers)):
            T.buffer_store(self._highest, T.max(self._highest[0], self._values[i]), [0])
        reduce_lanes(self._highest, 0, T.max)

    def _choose(self) -> None:
        """Find the best experts, one for each lane, and store them."""
        problem, best, lane, total = self._problem, self._best, self._lane, self._total
        count = ceil_div(problem.used, WARP)
        experts, powers = (local(count, dtype) for dtype in ("int32", "float32"))
        for register in (experts, powers):
            for i in range(count):
                T.buffer_store(register, tirx.const(0, str(register.dtype)), [i])
        if problem.normalizes:
            T.buffer_store(total, T.float32(0), [0])
        for number in range(problem.used):
            best.find()
            if number == 0 and problem.is_softmax and not (problem.needs_total or problem.has_groups):
                T.buffer_store(self._highest, best.value, [0])
            score = self._score(best.expert) if problem.needs_probabilities else best.value
            power = T.bind(problem.power(score, self._highest[0]))
            if problem.normalizes:
                T.buffer_store(total, total[0] + power, [0])
            slot, owner = divmod(number, WARP)
            for register, value in ((experts, best.expert), (powers, power)):
                T.buffer_store(register, T.Select(tirx.EQ(lane, owner), value, register[slot]), [slot])
            best.drop()
        for slot in range(count):
            number = T.bind(lane + slot * WARP)
            with when(number < problem.used):
                self._store(number, experts[slot], powers[slot])

    def _store(self, number: Expr, expert: Expr, power: Expr) -> None:
        tensors, problem = self._tensors, self._problem
        index = T.bind(self._row * problem.used + T.Cast("int64", number))
        T.buffer_store(tensors.ids, problem.id_of(expert), [index])
        T.buffer_store(tensors.shares, problem.share(power, self._total[0]), [index])
        if problem.has_counts:
            with when(tensors.sequences[self._row] >= 0):
                ptx.add_global(T.address_of(tensors.counts[expert]), T.uint32(1))


def _keep_groups(best: _Best, problem: RoutingProblem, numbers: list[Expr]) -> None:
    """Drop all experts of groups that are not among the greatest."""
    groups, size = problem.groups, problem.group_size
    sums, values = local(groups, "float32"), local(len(numbers), "float32")
    of_group = _Best(best.lane, values, problem.experts)
    for group in range(groups):
        for i, expert in enumerate(numbers):
            is_member = tirx.all(expert >= group * size, expert < (group + 1) * size)
            T.buffer_store(values, T.Select(is_member, best.values[i], _LOWEST), [i])
        for number in range(problem.group_best):
            of_group.find()
            T.buffer_store(sums, of_group.value if number == 0 else sums[group] + of_group.value, [group])
            of_group.drop()
    for group in range(groups):
        rank: Expr = T.int32(0)
        for other in range(groups):
            is_before = sums[other] >= sums[group] if other < group else sums[other] > sums[group]
            rank = rank + T.Cast("int32", is_before) if other != group else rank
        is_dropped = T.bind(rank >= problem.groups_used)
        for i, expert in enumerate(numbers):
            is_member = tirx.all(expert >= group * size, expert < (group + 1) * size)
            value = T.Select(tirx.all(is_member, is_dropped), _LOWEST, best.values[i])
            T.buffer_store(best.values, value, [i])


class _Best:
    """Writer of the search of a row's greatest value, which every lane gets, with its expert.

    `values`: registers with the values of experts `lane`, ``lane + 32``, ...
    """

    def __init__(self, lane: Expr, values: Any, experts: int) -> None:
        self.lane, self.values, self._experts = lane, values, experts
        self._best, self._index = local(1, "float32"), local(1, "int32")

    @property
    def value(self) -> Expr:
        """Greatest value."""
        return self._best[0]

    @property
    def expert(self) -> Expr:
        """Expert of the greatest value."""
        return self._index[0]

    def find(self) -> None:
        """Find the greatest value."""
        self._find_own()
        distance = WARP // 2
        while distance:
            mask = T.uint32(ALL_LANES)
            pair = (self.value, self.expert)
            self._keep_greater(*(T.bind(T.tvm_warp_shuffle_xor(mask, each, distance, WARP, WARP)) for each in pair))
            distance //= 2

    def _find_own(self) -> None:
        """Find the greatest value of the lane."""
        T.buffer_store(self._best, self.values[0], [0])
        T.buffer_store(self._index, T.min(self.lane, self._experts - 1), [0])
        for i in range(1, int(self.values.shape[0])):
            self._keep_greater(self.values[i], self.lane + i * WARP)

    def drop(self) -> None:
        """Remove the greatest value."""
        for i in range(int(self.values.shape[0])):
            is_best = tirx.EQ(self.expert, self.lane + i * WARP)
            T.buffer_store(self.values, T.Select(is_best, _LOWEST, self.values[i]), [i])

    def _keep_greater(self, value: Expr, expert: Expr) -> None:
        """Keep the greater of two values, of equal ones that with the lower number."""
        is_greater = tirx.any(value > self.value, tirx.all(tirx.EQ(value, self.value), expert < self.expert))
        with when(is_greater):
            T.buffer_store(self._best, value, [0])
            T.buffer_store(self._index, expert, [0])


class _ReducedBest(_Best):
    """`_Best` by reductions of a warp, of integers: of values with their order, then of numbers of equal ones."""

    def find(self) -> None:
        """See `_Best.find`."""
        self._find_own()
        sign, greatest, expert = T.uint32(1 << 31), local(1, "uint32"), local(1, "int32")
        # Zeros of both signs are equal.
        bits = T.bind(tirx.reinterpret("uint32", T.Select(tirx.EQ(self.value, T.float32(0)), T.float32(0), self.value)))
        key = T.bind(T.Select(bits < sign, bits + sign, T.bitwise_not(bits)))
        ptx.reduce_warp(greatest[0], key, "max")
        is_greatest = tirx.EQ(key, greatest[0])
        ptx.reduce_warp(expert[0], T.bind(T.Select(is_greatest, self.expert, T.int32(_NO_EXPERT))), "min")
        of_greatest = T.bind(T.Select(greatest[0] < sign, T.bitwise_not(greatest[0]), greatest[0] - sign))
        T.buffer_store(self._best, tirx.reinterpret("float32", of_greatest), [0])
        T.buffer_store(self._index, expert[0], [0])
