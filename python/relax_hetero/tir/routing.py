"""Routing of a mixture of experts: the experts that each row uses, and their shares.

Scores become powers (`ROUTING_KINDS`): positive numbers, whose proportions are the shares. Experts are chosen by
probability (a power; for a softmax, its share of all powers) plus a bias, if the model has biases. With groups, only
experts of the groups with the greatest sums of their best probabilities are chosen.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.builder import Expr, Function, flat, let, loop, materialize, when

ROUTING = "relax_hetero.routing"
"""On a PrimFunc for any device that routes rows to experts: its `RoutingProblem` as JSON."""

_MIN_PARALLEL_ROWS = 32

_MIN_TOTAL = 1e-20  # minimum sum of sigmoids, as in DeepSeek V3


@dataclass(frozen=True)
class RoutingKind:
    """Meaning of scores."""

    # True if powers are exponentials of scores, probabilities their shares of all experts; False if both are the
    # sigmoids of scores.
    is_softmax: bool
    # Number of a group's greatest probabilities whose sum ranks the group. Of a softmax it is the greatest, as in
    # DeepSeek V2; llama.cpp takes two for every kind.
    group_best: int
    normalizes: bool | None = None  # whether the shares of a row sum to the factor; None: the model says it


ROUTING_KINDS = {
    "softmax": RoutingKind(True, 1),
    "sigmoid": RoutingKind(False, 2),
    # The softmax of the chosen scores: powers over the sum of the chosen ones, as the others cancel out.
    "softmax_of_chosen": RoutingKind(True, 1, normalizes=True),
}
"""Kinds of routing by their names, in the order of ``expert_gating_func`` in GGUF files, which counts from 1."""


@dataclass(frozen=True)
class RoutingProblem:
    """Routing of rows to experts.

    Parameters of its kernel, in order: scores, (rows, experts) of float32; with `has_bias`, bias, (experts,) of
    float32; with `has_counts`, sequences, (rows,) of int32, and counts, (experts,) of int32; ids, (rows, used) of
    int32; shares, (rows, used) of float32. The experts of a row are in descending order of probability plus bias, equal
    ones by number. Counts grow by 1 for each expert of a row whose sequence is not negative.
    """

    rows: Dim
    # Number of experts, and of those of a row.
    experts: int
    used: int
    scale: float = 1.0  # factor of the shares
    # Whether the shares of a row sum to the factor: the sum is of the chosen experts' powers, not of all.
    normalizes: bool = True
    kind: str = "softmax"  # name of the `RoutingKind`
    has_bias: bool = False  # whether experts have biases, which count for their choice only
    # Number of groups of neighbouring experts, and of those that a row chooses from.
    groups: int = 1
    groups_used: int = 1
    has_counts: bool = False  # whether the rows of each expert are counted
    # First and number of the experts that a device has, whose ids count from the first; ids of others are -1. 0: the
    # device has all, as always with counts.
    first: int = 0
    own: int = 0

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> RoutingProblem:
        """Problem of a PrimFunc with the attribute."""
        return cls(**json.loads(str(func.attrs[ROUTING])))

    @property
    def is_softmax(self) -> bool:
        """True if powers are exponentials."""
        return ROUTING_KINDS[self.kind].is_softmax

    @property
    def has_groups(self) -> bool:
        """True if a row does not choose from all groups."""
        return self.groups_used < self.groups

    @property
    def group_size(self) -> int:
        """Number of experts of a group."""
        return self.experts // self.groups

    @property
    def group_best(self) -> int:
        """Number of a group's greatest probabilities whose sum ranks the group."""
        return min(ROUTING_KINDS[self.kind].group_best, self.group_size)

    @property
    def needs_probabilities(self) -> bool:
        """True if scores do not suffice for the choice, although they have the order of probabilities."""
        return self.has_bias or (self.has_groups and self.group_best > 1)

    @property
    def needs_total(self) -> bool:
        """True if the sum of all powers is needed."""
        return self.is_softmax and (self.needs_probabilities or not self.normalizes)

    def power(self, score: Expr, highest: Expr) -> Expr:
        """Power of a score, given the highest one of its row, which only a softmax reads."""
        return T.exp(score - highest) if self.is_softmax else T.sigmoid(score)

    def id_of(self, expert: Expr) -> Expr:
        """Id of a chosen expert, int32."""
        if not self.own:
            return expert
        number = T.bind(expert - self.first)
        return T.Select(tirx.all(number >= 0, number < self.own), number, -1)

    def share(self, power: Expr, total: Expr) -> Expr:
        """Share of a chosen expert, given the sum of the powers that shares are of."""
        share = power * T.float32(self.scale)
        if not (self.normalizes or self.is_softmax):
            return share
        # All chosen sigmoids may be 0.
        return share / (total if self.is_softmax else T.max(total, T.float32(_MIN_TOTAL)))


class RoutingTensors:
    """Parameters of a kernel, flat after `open`. `function`: function whose arguments they become."""

    scores: Any
    bias: Any
    sequences: Any
    counts: Any
    ids: Any
    shares: Any

    def __init__(self, function: Function, problem: RoutingProblem) -> None:
        self.rows = function.extent(problem.rows)
        parameters: dict[str, tuple[tuple[Expr, ...], str]] = {"scores": ((self.rows, problem.experts), "float32")}
        if problem.has_bias:
            parameters["bias"] = (problem.experts,), "float32"
        if problem.has_counts:
            parameters |= {"sequences": ((self.rows,), "int32"), "counts": ((problem.experts,), "int32")}
        parameters["ids"] = (self.rows, problem.used), "int32"
        parameters["shares"] = (self.rows, problem.used), "float32"
        self._parameters = {
            name: (function.argument(name, shape, dtype), shape) for name, (shape, dtype) in parameters.items()
        }

    def open(self) -> None:
        """Declare the elements, within the body of the function."""
        for name, (buffer, shape) in self._parameters.items():
            setattr(self, name, flat(buffer, shape))


def routing_kernel(problem: RoutingProblem) -> tirx.PrimFunc:
    """The kernel of CPUs, with the attribute `ROUTING`, by which GPUs get one of their own."""
    with Function("routing") as function:
        tensors = RoutingTensors(function, problem)
        with function.body():
            tensors.open()
            is_parallel = not isinstance(tensors.rows, int) or tensors.rows >= _MIN_PARALLEL_ROWS
            with loop(tensors.rows, parallel=is_parallel) as row:
                _Row(tensors, problem, row).route()
            if problem.has_counts:
                _count(tensors, problem)
    return function.result.with_attr(ROUTING, json.dumps(asdict(problem)))


def _count(tensors: RoutingTensors, problem: RoutingProblem) -> None:
    with loop(tensors.rows) as row, when(tensors.sequences[row] >= 0), loop(problem.used) as number:
        expert = materialize(tensors.ids[row * problem.used + number])
        T.buffer_store(tensors.counts, tensors.counts[expert] + 1, [expert])


class _Row:
    """Writer of the routing of a row; `left` has what experts are chosen by, -inf for those that cannot be."""

    def __init__(self, tensors: RoutingTensors, problem: RoutingProblem, row: Expr) -> None:
        self.tensors, self.problem = tensors, problem
        self.first_score, self.first = materialize(row * problem.experts), materialize(row * problem.used)
        self.left = T.alloc_buffer((problem.experts,), "float32", scope="global")
        self.best, self.total = (T.alloc_buffer((1,), dtype, scope="global") for dtype in ("int32", "float32"))
        self.highest: Expr = T.float32(0)

    def _score(self, expert: Expr) -> Expr:
        return self.tensors.scores[self.first_score + expert]

    def _power(self, expert: Expr) -> Expr:
        return let(self.problem.power(self._score(expert), self.highest))

    def route(self) -> None:
        """Write the experts and their shares."""
        problem, tensors, left = self.problem, self.tensors, self.left
        if problem.is_softmax:
            highest = T.alloc_buffer((1,), "float32", scope="global")
            T.buffer_store(highest, self._score(0), [0])
            with loop(problem.experts) as expert:
                T.buffer_store(highest, T.max(highest[0], self._score(expert)), [0])
            self.highest = let(highest[0])
        T.buffer_store(self.total, T.float32(0), [0])
        if problem.needs_total:
            with loop(problem.experts) as expert:
                T.buffer_store(self.total, self.total[0] + self._power(expert), [0])
        with loop(problem.experts) as expert:
            value = self._score(expert)
            if problem.needs_probabilities:
                value = self._power(expert) / self.total[0] if problem.is_softmax else self._power(expert)
                value = value + tensors.bias[expert] if problem.has_bias else value
            T.buffer_store(left, value, [expert])
        if problem.has_groups:
            self._keep_groups()
        if problem.normalizes:
            T.buffer_store(self.total, T.float32(0), [0])
        with loop(problem.used) as number:
            self._find_best(0, problem.experts)
            T.buffer_store(tensors.ids, problem.id_of(self.best[0]), [self.first + number])
            power = self._power(self.best[0])
            T.buffer_store(tensors.shares, power, [self.first + number])
            if problem.normalizes:
                T.buffer_store(self.total, self.total[0] + power, [0])
            T.buffer_store(left, T.float32(-math.inf), [self.best[0]])
        with loop(problem.used) as number:
            share = problem.share(tensors.shares[self.first + number], self.total[0])
            T.buffer_store(tensors.shares, share, [self.first + number])

    def _find_best(self, first: Expr, count: int) -> None:
        """Find the greatest of what is left of `count` experts."""
        T.buffer_store(self.best, T.Cast("int32", first), [0])
        with loop(count) as number:
            expert = materialize(first + number)
            with when(self.left[expert] > self.left[self.best[0]]):
                T.buffer_store(self.best, T.Cast("int32", expert), [0])

    def _keep_groups(self) -> None:
        """Drop all experts of groups that are not among the greatest."""
        problem, left = self.problem, self.left
        sums = T.alloc_buffer((problem.groups,), "float32", scope="global")
        rank = T.alloc_buffer((1,), "int32", scope="global")
        second = T.alloc_buffer((1,), "float32", scope="global")
        with loop(problem.groups) as group:
            first = materialize(group * problem.group_size)
            self._find_best(first, problem.group_size)
            T.buffer_store(sums, left[self.best[0]], [group])
            if problem.group_best > 1:
                T.buffer_store(second, T.float32(-math.inf), [0])
                with loop(problem.group_size) as number, when(tirx.NE(first + number, T.Cast("int64", self.best[0]))):
                    T.buffer_store(second, T.max(second[0], left[first + number]), [0])
                T.buffer_store(sums, sums[group] + second[0], [group])
        with loop(problem.groups) as group:
            T.buffer_store(rank, T.int32(0), [0])
            with loop(problem.groups) as other:
                is_equal_before = tirx.all(tirx.EQ(sums[other], sums[group]), other < group)
                with when(tirx.any(sums[other] > sums[group], is_equal_before)):
                    T.buffer_store(rank, rank[0] + 1, [0])
            with when(rank[0] >= problem.groups_used), loop(problem.group_size) as number:
                T.buffer_store(left, T.float32(-math.inf), [group * problem.group_size + number])
