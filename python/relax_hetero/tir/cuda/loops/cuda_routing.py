"""Routing of a mixture of experts on GPUs: a warp for each row, whose lanes hold the scores in registers."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, ceil_div, materialize, when
from ...routing import RoutingProblem, RoutingTensors
from ..core.launch import local, unrolled
from ..tile.register_tile import add, reduce_lanes
from .launch import launch, scheduled_as

_WARPS = 4


def routing_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """GPU kernel of a PrimFunc with the attribute `ROUTING`."""
    problem = RoutingProblem.of(func)
    function = Function("routing", registers="local")
    with function:
        tensors = RoutingTensors(function, problem)
        with function.body(), launch(ceil_div(tensors.rows, _WARPS), _WARPS * WARP) as (block, thread):
            tensors.open()
            row = materialize(block * _WARPS + thread // WARP)
            with when(row < tensors.rows):
                _route(tensors, problem, row, T.bind(T.Cast("int32", thread % WARP)))
    return scheduled_as(func, function.result)


def _route(tensors: RoutingTensors, problem: RoutingProblem, row: Expr, lane: Expr) -> None:
    experts, count = problem.experts, ceil_div(problem.experts, WARP)
    left, powers = local(count, "float32"), local(problem.used, "float32")
    best, index, highest = local(1, "float32"), local(1, "int32"), local(1, "float32")
    for i in range(count):
        expert = lane + i * WARP
        score = tensors.scores[row * experts + T.min(expert, experts - 1)]
        T.buffer_store(left, T.Select(expert < experts, score, T.float32(-math.inf)), [i])
    scores = left
    if not problem.normalizes:
        scores = local(count, "float32")
        for i in range(count):
            T.buffer_store(scores, left[i], [i])
    for number in range(problem.used):
        T.buffer_store(best, left[0], [0])
        T.buffer_store(index, T.min(lane, experts - 1), [0])
        for i in range(1, count):
            _keep_greater(best, index, left[i], lane + i * WARP)
        distance = WARP // 2
        while distance:
            mask = T.uint32(0xFFFFFFFF)
            other = [T.bind(T.tvm_warp_shuffle_xor(mask, each[0], distance, WARP, WARP)) for each in (best, index)]
            _keep_greater(best, index, *other)
            distance //= 2
        for i in range(count):
            is_chosen = tirx.EQ(index[0], lane + i * WARP)
            T.buffer_store(left, T.Select(is_chosen, T.float32(-math.inf), left[i]), [i])
        if number == 0:
            T.buffer_store(highest, best[0], [0])
        T.buffer_store(powers, T.exp(best[0] - highest[0]), [number])
        with when(tirx.EQ(lane, 0)):
            T.buffer_store(tensors.ids, index[0], [row * problem.used + number])
    total = local(1, "float32")
    T.buffer_store(total, T.float32(0), [0])
    if problem.normalizes:
        with unrolled(problem.used) as number:
            T.buffer_store(total, total[0] + powers[number], [0])
    else:
        for i in range(count):
            T.buffer_store(total, total[0] + T.exp(scores[i] - highest[0]), [0])
        reduce_lanes(total, 0, add)
    with when(tirx.EQ(lane, 0)), unrolled(problem.used) as number:
        share = powers[number] / total[0] * T.float32(problem.scale)
        T.buffer_store(tensors.shares, share, [row * problem.used + T.Cast("int64", number)])


def _keep_greater(best: Expr, index: Expr, score: Expr, expert: Expr) -> None:
    """Keep the greater of two scores, of equal ones that with the lower number."""
    is_greater = tirx.any(score > best[0], tirx.all(tirx.EQ(score, best[0]), expert < index[0]))
    with when(is_greater):
        T.buffer_store(best, score, [0])
        T.buffer_store(index, expert, [0])
