"""Recurrent layers: RNN, GRU and LSTM.

CPUs have one kernel for all steps (`tir.recurrence`). For other devices, and for layers of float64 or quantized ones, a
static number of steps is unrolled here; dynamic or very large numbers become a loop in the importer
(`onnx/control_flow/recurrent_loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from ...encoding.expression import Expression
from ...op.functions import apply_function
from ...tir.recurrence import GATES, PANEL_COLUMNS, RecurrenceProblem, recurrence_kernel
from ...transform.ir.extents import Symbols
from ...transform.ir.kernels import OPERATIONS, opaque_kernel
from ..import_devices import has_recurrent_kernels
from .elementwise import HALF, cast
from .node import Dim, Node, const, dtype_of
from .quantization import quantized_and_back
from .required_sizes import as_expr, renamed, require_equal, require_shape
from .table import converts

MAX_STEPS = 1024  # longer sequences become a loop

QUANTIZES = "quantizes_operands"
"""Internal attribute: the data and states are quantized to uint8 over their range before each product."""


@dataclass(frozen=True)
class Layer:
    """One direction of a recurrent node."""

    node: Node  # the converted node
    hidden: int  # size of the state
    recurrent: relax.Expr  # state weights, transposed, [hidden, gates * hidden]
    recurrent_bias: relax.Expr | None  # bias of the recurrent product, [gates * hidden], or None
    activations: tuple[str, ...]  # expressions of the activations in ONNX's order
    peepholes: list[relax.Expr] | None  # LSTM's cell weights of the gates i, o, f, or None

    def emit(self, expr: relax.Expr) -> relax.Expr:
        """Bind an expression."""
        return self.node.emit(expr)

    def add(self, a: relax.Expr, b: relax.Expr) -> relax.Expr:
        """The sum, bound."""
        return self.emit(a + b)

    def multiply(self, a: relax.Expr, b: relax.Expr) -> relax.Expr:
        """The product, bound."""
        return self.emit(a * b)

    def gates(self, value: relax.Expr, count: int) -> list[relax.Expr]:
        """Split a [batch, count * hidden] tensor by gate."""
        return [
            self.emit(relax.op.strided_slice(value, [1], [i * self.hidden], [(i + 1) * self.hidden]))
            for i in range(count)
        ]

    def project(self, state: relax.Expr) -> relax.Expr:
        """The state's contribution to all gates."""
        state = quantized_and_back(self.node, state) if self.node.attribute(QUANTIZES, 0) else state
        product = self.emit(relax.op.matmul(state, self.recurrent))
        return product if self.recurrent_bias is None else self.add(product, self.recurrent_bias)

    def activate(self, index: int, value: relax.Expr) -> relax.Expr:
        """Apply activation `index`."""

        def apply(name: str, args: list[Any], params: tuple[Any, ...]) -> Any:
            if name == "number":
                return const(params[0], dtype_of(value))
            return self.emit(apply_function(name, *args, *params))

        return Expression.parse(self.activations[index]).fold([value], apply)


_ACTIVATIONS = {
    "sigmoid": ("sigmoid(x0)", ()),
    "tanh": ("tanh(x0)", ()),
    "relu": ("relu(x0)", ()),
    "leakyrelu": ("leaky_relu(x0, {0})", (0.01,)),
    "hardsigmoid": ("clip(add(multiply(x0, {0}), {1}), 0.0, 1.0)", (0.2, 0.5)),
    "softsign": ("softsign(x0)", ()),
    "affine": ("add(multiply(x0, {0}), {1})", (1.0, 0.0)),
}
"""Expression of an activation by ONNX's name in lower case, and the defaults of alpha and beta."""


def _activations(node: Node, direction: int, directions: int) -> tuple[str, ...]:
    """Expressions of one direction's activations; alphas and betas are assigned in order to those that take one.

    Arguments are clipped if the node has `clip`, except for that of an LSTM's last activation, the cell.
    """
    names = [name.decode() if isinstance(name, bytes) else name for name in node.attribute("activations", ())]
    defaults = _STEPS[node.op_type][1]
    parameters = [list(node.attribute(f"activation_{name}", ())) for name in ("alpha", "beta")]
    limit, expressions = float(node.attribute("clip", 0.0)), []
    for index, name in enumerate(names or defaults * directions):
        if name.lower() not in _ACTIVATIONS:
            raise node.refusal(f"activation {name!r} cannot be imported; expected one of {', '.join(_ACTIVATIONS)}")
        text, numbers = _ACTIVATIONS[name.lower()]
        text = text.format(*(float(g.pop(0)) if g else n for g, n in zip(parameters, numbers, strict=False)))
        is_clipped = limit > 0 and index % len(defaults) < 2
        expressions.append(text.replace("x0", f"clip(x0, {-limit}, {limit})") if is_clipped else text)
    return tuple(expressions[direction * len(defaults) : (direction + 1) * len(defaults)])


def _rnn_step(layer: Layer, x: relax.Expr, states: list[relax.Expr]) -> list[relax.Expr]:
    return [layer.activate(0, layer.add(x, layer.project(states[0])))]


def _gru_step(layer: Layer, x: relax.Expr, states: list[relax.Expr]) -> list[relax.Expr]:
    """GRU step; `linear_before_reset` applies r after the product rather than before."""
    state = states[0]
    xz, xr, xh = layer.gates(x, 3)
    hidden = layer.hidden
    after = bool(layer.node.attribute("linear_before_reset", 0))
    hz, hr, hh = layer.gates(layer.project(state), 3)
    z, r = layer.activate(0, layer.add(xz, hz)), layer.activate(0, layer.add(xr, hr))
    if after:
        candidate = layer.add(xh, layer.multiply(r, hh))
    else:
        weight = layer.emit(relax.op.strided_slice(layer.recurrent, [1], [2 * hidden], [3 * hidden]))
        inner = layer.emit(relax.op.matmul(layer.multiply(r, state), weight))
        if layer.recurrent_bias is not None:
            bias = layer.emit(relax.op.strided_slice(layer.recurrent_bias, [0], [2 * hidden], [3 * hidden]))
            inner = layer.add(inner, bias)
        candidate = layer.add(xh, inner)
    h = layer.activate(1, candidate)
    keep = layer.multiply(z, state)
    return [layer.add(layer.multiply(layer.emit(const(1, dtype_of(state)) - z), h), keep)]


def _lstm_step(layer: Layer, x: relax.Expr, states: list[relax.Expr]) -> list[relax.Expr]:
    """LSTM step with gates in ONNX's order i, o, f, c; the output gate's peephole reads the new cell."""
    state, cell = states
    i, o, f, c = layer.gates(layer.add(x, layer.project(state)), 4)
    if layer.peepholes is not None:
        i = layer.add(i, layer.multiply(layer.peepholes[0], cell))
        f = layer.add(f, layer.multiply(layer.peepholes[2], cell))
    i = layer.activate(0, i)
    if layer.node.attribute("input_forget", 0):
        f = layer.emit(const(1, dtype_of(i)) - i)
    else:
        f = layer.activate(0, f)
    new_cell = layer.add(layer.multiply(f, cell), layer.multiply(i, layer.activate(1, c)))
    if layer.peepholes is not None:
        o = layer.add(o, layer.multiply(layer.peepholes[1], new_cell))
    return [layer.multiply(layer.activate(0, o), layer.activate(2, new_cell)), new_cell]


Step = Callable[[Layer, relax.Expr, list[relax.Expr]], list[relax.Expr]]
_STEPS: dict[str, tuple[Step, list[str]]] = {
    "RNN": (_rnn_step, ["Tanh"]),
    "GRU": (_gru_step, ["Sigmoid", "Tanh"]),
    "LSTM": (_lstm_step, ["Sigmoid", "Tanh", "Tanh"]),
}


def _row(node: Node, value: relax.Expr, index: int) -> relax.Expr:
    """Element `index` of the first axis, which is removed."""
    cut = node.emit(relax.op.strided_slice(value, [0], [index], [index + 1]))
    return node.emit(relax.op.squeeze(cut, [0]))


@dataclass(frozen=True)
class Direction:
    """One direction of a recurrent node, ready to run."""

    layer: Layer
    inputs: relax.Expr  # products of the data with the input weights, [steps, batch, gates * hidden]
    states: list[relax.Expr]  # initial states, each [batch, hidden]
    lengths: relax.Expr | None  # lengths of the sequences, [batch, 1], or None
    is_backwards: bool  # True if it runs from the last step to the first

    def advance(
        self, x: relax.Expr, states: list[relax.Expr], is_active: relax.Expr | None
    ) -> tuple[relax.Expr, list[relax.Expr]]:
        """The output of a step and the new states; `is_active` masks sequences that have not ended, [batch, 1]."""
        new_states = _STEPS[self.layer.node.op_type][0](self.layer, x, states)
        output = new_states[0]
        if is_active is not None:  # an ended sequence keeps its state and outputs zeros
            output = self.layer.emit(relax.op.where(is_active, output, const(0, dtype_of(output))))
            new_states = [
                self.layer.emit(relax.op.where(is_active, value, old))
                for value, old in zip(new_states, states, strict=True)
            ]
        return output, new_states


RunDirection = Callable[[Callable[[], Direction]], tuple[relax.Expr, list[relax.Expr]]]
"""Function that runs a direction: outputs of all steps, [steps, batch, hidden], and the last states."""


def _direction(node: Node, data: relax.Expr, direction: int, count: int, is_backwards: bool) -> Direction:
    gates = GATES[node.op_type]
    batch = node.shape(data)[1]
    dtype, hidden = dtype_of(data), _hidden_size(node)
    transposed = [node.emit(relax.op.permute_dims(_row(node, node.inputs[i], direction), [1, 0])) for i in (1, 2)]
    inputs = node.emit(relax.op.matmul(data, transposed[0]))
    recurrent_bias = None
    if node.has(3):
        bias = _row(node, node.tensor(3), direction)
        size = gates * hidden
        inputs = node.emit(inputs + relax.op.strided_slice(bias, [0], [0], [size]))
        recurrent_bias = node.emit(relax.op.strided_slice(bias, [0], [size], [2 * size]))
    peepholes = None
    if node.op_type == "LSTM" and node.has(7):
        row = _row(node, node.tensor(7), direction)
        peepholes = [node.emit(relax.op.strided_slice(row, [0], [i * hidden], [(i + 1) * hidden])) for i in range(3)]
    layer = Layer(node, hidden, transposed[1], recurrent_bias, _activations(node, direction, count), peepholes)
    states = [_row(node, state, direction) for state in _initial_states(node, [count, batch, hidden], dtype)]
    lengths = node.emit(relax.op.reshape(_lengths(node, data), (batch, 1))) if node.has(4) else None
    return Direction(layer, inputs, states, lengths, is_backwards)


def _initial_states(node: Node, shape: list[Dim], dtype: str) -> list[relax.Expr]:
    """Initial states of all directions, [directions, batch, hidden] each; zeros by default."""
    states = []
    for index in (5, 6) if node.op_type == "LSTM" else (5,):
        if node.has(index):
            state = node.tensor(index)
            states.append(node.emit(relax.op.permute_dims(state, [1, 0, 2])) if node.attribute("layout", 0) else state)
        elif isinstance(shape[1], int):
            node.check_constant_size(*shape)
            states.append(const(np.zeros(shape), dtype))
        else:
            states.append(node.filled(shape, 0, dtype))
    return states


def _lengths(node: Node, data: relax.Expr) -> relax.Expr:
    """Lengths of the sequences, [batch] of int64, which a call checks."""
    lengths = cast(node, node.tensor(4), "int64")
    return node.kernel("lengths", lambda i, length, _: length(*i), lengths, data, ranges=(0, 1, 0, 1))


def _unroll(make: Callable[[], Direction]) -> tuple[relax.Expr, list[relax.Expr]]:
    direction = make()
    node, states, lengths = direction.layer.node, direction.states, direction.lengths
    steps, outputs = range(int(direction.inputs.ty.shape.values[0])), []
    for time in reversed(steps) if direction.is_backwards else steps:
        is_active = None
        if lengths is not None:
            is_active = node.emit(lengths > const(time, dtype_of(lengths)))
        output, states = direction.advance(_row(node, direction.inputs, time), states, is_active)
        outputs.append(output)
    if not outputs:
        return node.filled([0, *node.shape(states[0])], 0, dtype_of(states[0])), states
    return node.emit(relax.op.stack(outputs[::-1] if direction.is_backwards else outputs, axis=0)), states


def _hidden_size(node: Node) -> int:
    return int(node.attribute("hidden_size") or node.static_shape(node.tensor(2))[2])


def _check_inputs(node: Node, data: relax.Expr, directions: int) -> Node:
    """Require that the inputs' sizes match the data's, [steps, batch, input size]."""
    _, batch, width = node.shape(data)
    hidden, gates = _hidden_size(node), GATES[node.op_type]
    state = [batch, directions, hidden] if node.attribute("layout", 0) else [directions, batch, hidden]
    expected: dict[int, list[Dim]] = {
        1: [directions, gates * hidden, width],
        2: [directions, gates * hidden, hidden],
        3: [directions, 2 * gates * hidden],
        4: [batch],
        5: list(state),
        6: list(state),
        7: [directions, 3 * hidden],
    }
    inputs = list(node.inputs)
    for index, shape in expected.items():
        if node.has(index):
            inputs[index] = require_shape(node, node.tensor(index), shape, f"input {index}")
    return replace(node, inputs=inputs)


def _with_static_batch(node: Node, data: relax.Expr) -> relax.Expr:
    """Give the data, [steps, batch, input size], the static batch size of lengths or states if they have one."""
    steps, batch, width = node.shape(data)
    is_first = bool(node.attribute("layout", 0))
    axes = {4: 0, 5: 0 if is_first else 1, 6: 0 if is_first else 1}
    batch_inputs = [(node.shape(node.tensor(index)), axis) for index, axis in axes.items() if node.has(index)]
    sizes = [dims[axis] for dims, axis in batch_inputs if len(dims) > axis and isinstance(dims[axis], int)]
    if isinstance(batch, int) or not sizes:
        return data
    require_equal(node, batch, sizes[0], "axis 1 of its input, the batch, has")
    return renamed(node, data, [steps, sizes[0], width])


def steps_of(node: Node) -> Dim:
    """Number of time steps of a recurrent node."""
    data = node.tensor(0)
    if node.rank(data) != 3:
        raise node.refusal(f"its input has {node.rank(data)} dimensions, expected 3: steps, batch and features")
    return node.shape(data)[1 if node.attribute("layout", 0) else 0]


def recurrent_outputs(node: Node, run: RunDirection | None) -> list[relax.Expr]:
    """All outputs of a recurrent node; `run` computes each direction, the kernel of whole layers if it is None."""
    data = node.tensor(0)
    is_batch_first = bool(node.attribute("layout", 0))
    if is_batch_first:
        data = node.emit(relax.op.permute_dims(data, [1, 0, 2]))
    direction = node.attribute("direction", "forward")
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    data = _with_static_batch(node, data)
    node = _check_inputs(node, data, len(backwards))
    if node.attribute(QUANTIZES, 0):
        data = quantized_and_back(node, data)
    if run is None:
        sequence, *finals = _call_kernel(node, data, tuple(backwards))
    else:
        results = [
            run(partial(_direction, node, data, index, len(backwards), is_backwards))
            for index, is_backwards in enumerate(backwards)
        ]
        sequence = node.emit(relax.op.stack([outputs for outputs, _ in results], axis=1))
        finals = [
            node.emit(relax.op.stack([states[i] for _, states in results], axis=0)) for i in range(len(results[0][1]))
        ]
    if is_batch_first:
        sequence = node.emit(relax.op.permute_dims(sequence, [2, 0, 1, 3]))
        finals = [node.emit(relax.op.permute_dims(value, [1, 0, 2])) for value in finals]
    return [sequence, *finals]


def has_kernel(node: Node) -> bool:
    """Return whether all devices of the import have a kernel of the whole layer."""
    is_plain = node.op_type in GATES and not node.attribute(QUANTIZES, 0)
    is_float = dtype_of(node.tensor(0)) in ("float32", *HALF)
    return has_recurrent_kernels() and is_plain and is_float and 0 not in node.shape(node.tensor(0))[1:]


def _call_kernel(node: Node, data: relax.Expr, backwards: tuple[bool, ...]) -> list[relax.Expr]:
    """Outputs, [steps, directions, batch, hidden], and last states of all directions, by one kernel in float32."""
    steps, batch, _ = node.shape(data)
    problem = _problem(node, steps, batch, backwards)
    directions, hidden = problem.directions, problem.hidden
    weights = _floats(node, 1, directions * GATES[node.op_type] * hidden, node.shape(node.tensor(1))[2])
    inputs = node.emit(relax.op.matmul(cast(node, data, "float32"), relax.op.permute_dims(weights, [1, 0])))
    operands = _panels(node, problem)
    if node.has(3):
        bias, *recurrent_biases = _biases(node, problem)
        inputs = node.emit(inputs + bias)
        operands += recurrent_biases
    states = _initial_states(node, [directions, batch, hidden], "float32")
    operands += [cast(node, state, "float32") for state in states]
    operands += [_floats(node, 7, directions, 3, hidden)] if problem.has_peepholes else []
    operands += [_lengths(node, data)] if problem.has_lengths else []
    extents = dict(zip((problem.steps, problem.batch), (steps, batch), strict=True))
    results = list(problem.operands.values())[1 + len(operands) :]
    types = [relax.TensorType([extents.get(dim, dim) for dim in result.shape], result.dtype) for result in results]
    kernel = opaque_kernel(recurrence_kernel(problem))
    if isinstance(steps, int) and isinstance(batch, int):
        kernel = kernel.with_attr(OPERATIONS, steps * batch * problem.step_operations)
    name = node.builder.add_func(kernel, node.op_type.lower())
    call = node.emit(relax.op.call_tir(name, [inputs, *operands], types))
    fields = [node.emit(relax.TupleGetItem(call, index)) for index in range(1 + len(states))]
    return [cast(node, field, dtype_of(data)) for field in fields]


def _problem(node: Node, steps: Dim, batch: Dim, backwards: tuple[bool, ...]) -> RecurrenceProblem:
    """The kernel's problem."""
    symbols, directions = Symbols(), len(backwards)
    resets_after = bool(node.attribute("linear_before_reset", 0))
    return RecurrenceProblem(
        node.op_type,
        symbols.dim(as_expr(steps)),
        symbols.dim(as_expr(batch)),
        _hidden_size(node),
        backwards,
        tuple(_activations(node, direction, directions) for direction in range(directions)),
        has_bias=node.has(3) and node.op_type == "GRU" and resets_after,
        has_peepholes=node.op_type == "LSTM" and node.has(7),
        has_lengths=node.has(4),
        linear_before_reset=resets_after,
        input_forget=bool(node.attribute("input_forget", 0)),
    )


def _floats(node: Node, index: int, *shape: Dim) -> relax.Expr:
    """Input `index` in float32, with another shape."""
    return node.emit(relax.op.reshape(cast(node, node.tensor(index), "float32"), shape))


def _biases(node: Node, problem: RecurrenceProblem) -> list[relax.Expr]:
    """Biases that the products of the inputs take, [directions * gates * hidden], and the kernel's own one, if any."""
    directions, gates, hidden = problem.directions, GATES[node.op_type], problem.hidden
    biases = _floats(node, 3, directions, 2, gates, hidden)
    own, recurrent = (node.emit(relax.op.strided_slice(biases, [1], [i], [i + 1])) for i in (0, 1))
    kernel_biases = []
    if problem.has_bias:
        last = node.emit(relax.op.strided_slice(recurrent, [2], [gates - 1], [gates]))
        kernel_biases.append(node.emit(relax.op.reshape(last, (directions, hidden))))
        recurrent = node.emit(recurrent * const(np.arange(gates).reshape(-1, 1) < gates - 1, "float32"))
    total = node.emit(own + recurrent)
    return [node.emit(relax.op.reshape(total, (directions * gates * hidden,))), *kernel_biases]


def _panels(node: Node, problem: RecurrenceProblem) -> list[relax.Expr]:
    """Recurrent weights, packed for each phase of the kernel."""
    directions, hidden, panels = problem.directions, problem.hidden, (problem.panels, PANEL_COLUMNS)
    weights = _floats(node, 2, directions, GATES[node.op_type], hidden, hidden)
    padding = problem.panels * PANEL_COLUMNS - hidden
    if padding:
        weights = node.emit(relax.op.nn.pad(weights, [0, 0, 0, 0, 0, padding, 0, 0]))
    packed, first = [], 0
    for gates in problem.phases:
        phase = node.emit(relax.op.strided_slice(weights, [1], [first], [first + gates]))
        phase = node.emit(relax.op.reshape(phase, (directions, gates, *panels, hidden)))
        phase = node.emit(relax.op.permute_dims(phase, [0, 2, 4, 1, 3]))
        packed.append(node.emit(relax.op.reshape(phase, (directions, panels[0], hidden, gates * PANEL_COLUMNS))))
        first += gates
    return packed


@converts("RNN", "GRU", "LSTM")
def recurrent(node: Node) -> relax.Expr:
    """Call the kernel of a recurrent layer, or unroll it."""
    steps = steps_of(node)
    if has_kernel(node):
        return node.outputs(recurrent_outputs(node, None))
    if not isinstance(steps, int) or steps > MAX_STEPS:
        raise node.refusal(f"has sequences of {steps} steps, expected 0 to {MAX_STEPS}")
    return node.outputs(recurrent_outputs(node, _unroll))
