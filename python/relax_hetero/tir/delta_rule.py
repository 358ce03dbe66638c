"""The gated delta rule: linear attention whose cache is a matrix for each head, and the convolution before it.

For each token, in order, a head's matrix ``S``, (key_size, value_size), becomes ``d * S + k (v - d * S^T k)^T * b``,
and the result is ``S^T q / sqrt(key_size)``; ``q`` and ``k`` have the length 1, ``b`` is the sigmoid of the token's
number `beta`, and the decay ``d`` is ``exp(a * softplus(alpha + dt))`` (arXiv:2412.06464). Queries, keys and values are
convolved over the last tokens before, channel by channel, which are cached, too.

Rows of one sequence are computed one after another in every kind of call, so that decoding has the bits of prefill.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    either,
    flat,
    let,
    load_lanes,
    loop,
    materialize,
    over_lanes,
    store_lanes,
    when,
    zeros,
)
from .math.vector_math import silu

DELTA_RULE = "relax_hetero.delta_rule"
"""On a PrimFunc for any device, of the rule or of its convolution: its `DeltaRuleProblem` as JSON."""

_LANES = 32  # maximum neighbouring columns of a matrix that are computed, and stored, together
_CHANNELS = 256  # channels of a task of the convolution
_EPSILON = 1e-6  # number that the squares of queries and keys are added to


@dataclass(frozen=True)
class DeltaRuleSizes:
    """Sizes of a layer with the gated delta rule."""

    # Heads of queries and keys, and of values; the latter is a multiple of the former.
    key_heads: int
    value_heads: int
    # Elements of a head.
    key_size: int
    value_size: int
    taps: int  # tokens that the convolution sees
    # True if value head h reads key head ``h % key_heads``, False if ``h // (value_heads // key_heads)``.
    is_tiled: bool

    @property
    def channels(self) -> int:
        """Elements of the queries, keys and values of a row."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def lanes(self) -> int:
        """Columns of a block of a matrix."""
        return math.gcd(self.value_size, _LANES)

    @property
    def tasks(self) -> int:
        """Blocks of columns of all heads."""
        return self.value_heads * self.value_size // self.lanes

    @property
    def elements(self) -> int:
        """Elements of the state of a sequence."""
        return (self.taps - 1) * self.channels + self.value_heads * self.key_size * self.value_size

    def key_head(self, head: Expr) -> Expr:
        """Head of queries and keys that a head of values reads."""
        return head % self.key_heads if self.is_tiled else head // (self.value_heads // self.key_heads)

    def block_start(self, slot: Expr, task: Expr) -> Expr:
        """First element of a block of a sequence's matrices."""
        before = (self.taps - 1) * self.channels
        return slot * self.elements + before + task * (self.key_size * self.lanes)

    def value_start(self, row: Expr, task: Expr) -> Expr:
        """First element of the values of a block in the convolution's results."""
        return row * self.channels + 2 * self.key_heads * self.key_size + task * self.lanes


@dataclass(frozen=True)
class DeltaRuleProblem(DeltaRuleSizes):
    """Rows of a layer with the gated delta rule.

    A sequence's state is (elements,) of float32: the inputs of the convolution of its last ``taps - 1`` tokens, (taps -
    1, channels), then the matrices, each in blocks of `lanes` columns. It counts as zeros at position 0.

    Parameters of the convolution's kernel, in order: inputs, (rows, channels); weights, (taps, channels); sequences and
    positions, (rows,) of int32; states, (slots, elements), written in place; results, (rows, channels). Those of the
    rule: the convolution's results; beta and alpha, (rows, value_heads); a and dt, (value_heads,); sequences,
    positions and states; results, (rows, value_heads * value_size). All others are float32. Rows of sequence -1 write
    no state, and their results are zeros.
    """

    # Rows of a call, and sequences in the cache.
    rows: int
    slots: int
    is_chunk: bool  # True if all rows belong to the sequence of row 0
    is_convolution: bool = False  # True on the convolution's kernel

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> DeltaRuleProblem:
        """Problem of a PrimFunc with the attribute."""
        return cls(**json.loads(str(func.attrs[DELTA_RULE])))


class DeltaRuleTensors:
    """Parameters of a kernel, flat after `open`. `function`: function whose arguments they become."""

    inputs: Any
    weights: Any
    beta: Any
    alpha: Any
    a: Any
    dt: Any
    sequences: Any
    positions: Any
    states: Any
    results: Any

    def __init__(self, function: Function, problem: DeltaRuleProblem) -> None:
        rows, heads, channels = problem.rows, problem.value_heads, problem.channels
        shapes: dict[str, tuple[int, ...]] = {"inputs": (rows, channels)}
        if problem.is_convolution:
            shapes["weights"] = (problem.taps, channels)
        else:
            shapes |= {"beta": (rows, heads), "alpha": (rows, heads), "a": (heads,), "dt": (heads,)}
        shapes |= {"sequences": (rows,), "positions": (rows,), "states": (problem.slots, problem.elements)}
        shapes["results"] = (rows, channels if problem.is_convolution else heads * problem.value_size)
        integers = ("sequences", "positions")
        self._problem = problem
        self._parameters = {
            name: (function.argument(name, shape, "int32" if name in integers else "float32"), shape)
            for name, shape in shapes.items()
        }

    def open(self) -> None:
        """Declare the elements, within the body of the function."""
        for name, (buffer, shape) in self._parameters.items():
            setattr(self, name, flat(buffer, shape))

    def slot(self, row: Expr) -> Expr:
        """Slot of a row's sequence."""
        return materialize(T.Cast("int64", self.sequences[row]))

    def decay(self, row: Expr, head: Expr) -> Expr:
        """Factor of a head's matrix."""
        x = let(self.alpha[row * self._problem.value_heads + head] + self.dt[head])
        softplus = T.max(x, T.float32(0)) + T.log(T.float32(1) + T.exp(-T.abs(x)))
        return let(T.exp(self.a[head] * softplus))

    def share(self, row: Expr, head: Expr) -> Expr:
        """Share of the difference between a value and the matrix's that is added."""
        return let(T.sigmoid(self.beta[row * self._problem.value_heads + head]))

    def query_start(self, row: Expr, head: Expr) -> Expr:
        """First element of the query of a head of values."""
        problem = self._problem
        return materialize(row * problem.channels + problem.key_head(head) * problem.key_size)

    @property
    def key_offset(self) -> int:
        """Elements from a query to its key."""
        return self._problem.key_heads * self._problem.key_size


def inverse_length(squares: Expr) -> Expr:
    """Reciprocal of a vector's length."""
    return let(T.rsqrt(squares + T.float32(_EPSILON)))


def convolution_kernel(problem: DeltaRuleProblem) -> tirx.PrimFunc:
    """The convolution on CPUs, with the attribute `DELTA_RULE`, by which GPUs get one of their own."""
    lanes, channels = math.gcd(problem.channels, _LANES), problem.channels
    vectors = math.gcd(channels // lanes, _CHANNELS // lanes)
    tasks = channels // (lanes * vectors)

    def emit(tensors: DeltaRuleTensors) -> None:
        with loop(tasks, parallel=tasks > 1) as task, loop(problem.rows) as row, loop(vectors) as vector:
            _convolve(tensors, problem, row, materialize((task * vectors + vector) * lanes), lanes)

    return _kernel("causal_convolution", problem, emit)


def _convolve(tensors: DeltaRuleTensors, problem: DeltaRuleProblem, row: Expr, channel: Expr, lanes: int) -> None:
    """Write the results of some channels of a row, and move their inputs into the state."""
    slot, channels, before = tensors.slot(row), problem.channels, problem.taps - 1
    result, total = materialize(row * channels + channel), Registers(1, "float32", lanes)
    total[0] = zeros("float32", lanes)
    with when(slot >= 0):
        first = materialize(slot * problem.elements + channel)
        with when(tirx.EQ(tensors.positions[row], 0)), loop(before) as tap:
            store_lanes(tensors.states, first + tap * channels, zeros("float32", lanes), lanes)
        value = let(load_lanes(tensors.inputs, result, lanes))
        for tap in range(problem.taps):
            source = value if tap == before else let(load_lanes(tensors.states, first + tap * channels, lanes))
            total[0] = total[0] + source * load_lanes(tensors.weights, tap * channels + channel, lanes)
            if tap:
                store_lanes(tensors.states, first + (tap - 1) * channels, source, lanes)
        total[0] = silu(total[0])
    store_lanes(tensors.results, result, total[0], lanes)


def delta_rule_kernel(problem: DeltaRuleProblem) -> tirx.PrimFunc:
    """The rule on CPUs, with the attribute `DELTA_RULE`, by which GPUs get one of their own."""

    def emit(tensors: DeltaRuleTensors) -> None:
        with loop(problem.tasks, parallel=problem.tasks > 1) as task, loop(problem.rows) as row:
            start = materialize(row * (problem.value_heads * problem.value_size) + task * problem.lanes)
            either(
                tensors.sequences[row] >= 0,
                lambda: store_lanes(tensors.results, start, _update(tensors, problem, row, task), problem.lanes),
                lambda: store_lanes(tensors.results, start, zeros("float32", problem.lanes), problem.lanes),
            )

    return _kernel("delta_rule", problem, emit)


def _kernel(name: str, problem: DeltaRuleProblem, emit: Any) -> tirx.PrimFunc:
    with Function(name) as function:
        tensors = DeltaRuleTensors(function, problem)
        with function.body():
            tensors.open()
            emit(tensors)
    return function.result.with_attr(DELTA_RULE, json.dumps(asdict(problem)))


def _update(tensors: DeltaRuleTensors, problem: DeltaRuleProblem, row: Expr, task: Expr) -> Expr:
    """Write a block of a matrix, and return the result's elements."""
    lanes, size = problem.lanes, problem.key_size
    head = materialize(task // (problem.value_size // lanes))
    first, query = materialize(problem.block_start(tensors.slot(row), task)), tensors.query_start(row, head)
    key = materialize(query + tensors.key_offset)
    with when(tirx.EQ(tensors.positions[row], 0)), loop(size) as element:
        store_lanes(tensors.states, first + element * lanes, zeros("float32", lanes), lanes)
    decay, share = tensors.decay(row, head), tensors.share(row, head)
    query_factor, key_factor = (inverse_length(_squares(tensors.inputs, start, size)) for start in (query, key))
    sums, total = Registers(1, "float32", lanes), Registers(1, "float32", lanes)
    sums[0] = total[0] = zeros("float32", lanes)
    with loop(size) as element:
        old = load_lanes(tensors.states, first + element * lanes, lanes)
        sums[0] = sums[0] + old * broadcast(tensors.inputs[key + element], lanes)
    values = load_lanes(tensors.inputs, materialize(problem.value_start(row, task)), lanes)
    known = sums[0] * broadcast(decay * key_factor, lanes)
    change = let((values - known) * broadcast(share * key_factor, lanes))
    with loop(size) as element:
        old = load_lanes(tensors.states, first + element * lanes, lanes)
        new = let(old * broadcast(decay, lanes) + change * broadcast(tensors.inputs[key + element], lanes))
        store_lanes(tensors.states, first + element * lanes, new, lanes)
        total[0] = total[0] + new * broadcast(tensors.inputs[query + element], lanes)
    return total[0] * broadcast(query_factor * T.float32(size**-0.5), lanes)


def _squares(buffer: Any, start: Expr, count: int) -> Expr:
    """Sum of the squares of `count` elements."""
    lanes = math.gcd(count, _LANES)
    total = Registers(1, "float32", lanes)
    total[0] = zeros("float32", lanes)
    with loop(count // lanes) as vector:
        values = let(load_lanes(buffer, materialize(start + vector * lanes), lanes))
        total[0] = total[0] + values * values
    return over_lanes(total[0], lambda x, y: x + y, lanes)
