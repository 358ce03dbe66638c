"""Query and key heads of a row for attention: normalized and rotated (RoPE), vector by vector."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import CachedAttentionProblem
from ...core.builder import Expr, Registers, broadcast, lane_of, let, loop, materialize, over_lanes, zeros
from .spec import Tensors

Sink = Callable[[Expr, Expr, int], None]
"""Function of the index of the first element, float32 elements, and their number."""


def emit_head(
    problem: CachedAttentionProblem,
    tensors: Tensors,
    row: Expr,  # row of the rotation
    start: Expr,  # offset of the head in `qkv`, in elements
    norm: str,  # name of the norm's factors, "q_norm" or "k_norm"; "" for neither norm nor rotation
    sink: Sink,
) -> None:
    """Normalize and rotate a head of `qkv`, and give its vectors to `sink`."""
    lanes = gcd(problem.size, tensors.lanes)
    has_norm = bool(norm) and problem.operand_index(norm) is not None
    factor = _norm_factor(problem, tensors, lanes, start) if has_norm else None

    def element(index: Expr, count: int) -> Expr:
        value = tensors.number("qkv", start + index, count)
        if factor is None:
            return let(value)
        return let(value * broadcast(factor, count) * tensors.number(norm, index, count))

    rotated = problem.rotary_size if norm else 0
    if rotated:
        half = rotated // 2
        emit = _emit_halves if problem.rotary == "halves" else _emit_pairs
        emit(tensors, gcd(half, lanes), half, materialize(row * rotated), element, sink)
    step = gcd(problem.size - rotated, lanes) if rotated else lanes
    if rotated < problem.size:
        with loop((problem.size - rotated) // step) as vector:
            index = materialize(vector * step + rotated)
            sink(index, element(index, step), step)


def _norm_factor(problem: CachedAttentionProblem, tensors: Tensors, lanes: int, start: Expr) -> Expr:
    """The reciprocal root mean square of a head."""
    squares = Registers(1, "float32", lanes)
    squares[0] = zeros("float32", lanes)
    with loop(problem.size // lanes) as vector:
        value = let(tensors.number("qkv", start + vector * lanes, lanes))
        squares[0] = squares[0] + value * value
    total = over_lanes(squares[0], lambda left, right: left + right, lanes)
    mean = total * tirx.const(1.0 / problem.size, "float32") + tirx.const(problem.eps, "float32")
    return let(tirx.const(1.0, "float32") / T.sqrt(mean))


def _emit_halves(
    tensors: Tensors, lanes: int, half: int, row: Expr, element: Callable[[Expr, int], Expr], sink: Sink
) -> None:
    with loop(half // lanes) as vector:
        index = materialize(vector * lanes)
        cosine, sine = _angles(tensors, row, index, half, lanes)
        left, right = element(index, lanes), element(index + half, lanes)
        sink(index, let(left * cosine - right * sine), lanes)
        sink(materialize(index + half), let(right * cosine + left * sine), lanes)


def _emit_pairs(
    tensors: Tensors, lanes: int, half: int, row: Expr, element: Callable[[Expr, int], Expr], sink: Sink
) -> None:
    with loop(half // lanes) as vector:
        index = materialize(vector * lanes)
        cosine, sine = _angles(tensors, row, index, half, lanes)
        interleaved = element(materialize(index * 2), 2 * lanes)
        left = let(_select_lanes(interleaved, list(range(0, 2 * lanes, 2))))
        right = let(_select_lanes(interleaved, list(range(1, 2 * lanes, 2))))
        rotated = [let(left * cosine - right * sine), let(right * cosine + left * sine)]
        order = [lane + half_index * lanes for lane in range(lanes) for half_index in (0, 1)]
        sink(materialize(index * 2), let(T.Shuffle(rotated, order)), 2 * lanes)


def _select_lanes(vector: Expr, numbers: list[int]) -> Expr:
    return lane_of(vector, numbers[0]) if len(numbers) == 1 else T.Shuffle([vector], numbers)


def _angles(tensors: Tensors, row: Expr, index: Expr, half: int, lanes: int) -> tuple[Expr, Expr]:
    cosine = let(tensors.number("rotation", row + index, lanes))
    return cosine, let(tensors.number("rotation", row + index + half, lanes))
