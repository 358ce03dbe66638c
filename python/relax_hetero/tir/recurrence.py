"""Recurrent layers: all time steps of an RNN, a GRU or an LSTM in one kernel, for CPUs.

A step multiplies the states by the recurrent weights with the register tile of matrix products, and applies the gates
to a panel's sums while they are in the L1 cache. The products of the inputs, which do not depend on the states, are an
operand: one matrix product over all steps.

Directions and rows of the batch are independent, so that cores share them for all steps. A few rows of a large layer
share a step's columns instead, and meet after each step.

The GPU kernel of the same problem is in `relax_hetero.tir.cuda.loops.cuda_recurrence`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.expression import Expression
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import Dim, Operand
from ..target.cpu_target import INSTRUCTION_SETS, CpuTarget
from ..target.dot_instructions import dot_instruction_for
from ..target.tiles import tile_sizes
from .core.bounds import BOUNDED
from .core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    either,
    lane_mask,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from .core.view import Coordinates, OperandView
from .core.work_split import part, tasks_for
from .elementwise.expression_code import EpilogueCode, emit
from .elementwise.expression_ops import FLOAT_OPS
from .math.vector_math import constant, once, quick_sigmoid, quick_tanh
from .matmul.matmul_spec import KRange, MatmulSpec, emit_cases, make_tile, row_cases
from .matmul.matmul_tile import accumulator_count, emit_tile

RECURRENCE = "relax_hetero.recurrence"
"""On a PrimFunc without vectors that computes a recurrent layer: its `RecurrenceProblem` as JSON."""

PANEL_COLUMNS = 16  # columns of each gate in a panel of recurrent weights: whole vectors of every CPU
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}  # number of gates by op, in ONNX's order

TILE_VECTORS = 4
"""Vectors of a register tile, at least. Eight would fill the pipelines of a single row better, but its weights come
from the L2, and less of a wider panel is in the L1 when the next step begins: wider panels took longer (Zen 4)."""

MIN_COMPUTE_BOUND_ROWS = 2  # rows whose multiply-adds take as long as reading their weights from the L2

_DTYPE = "float32"
_GATE_OPS = {**FLOAT_OPS, "tanh": quick_tanh, "sigmoid": quick_sigmoid}


@dataclass(frozen=True)
class RecurrenceProblem:
    """A recurrent layer of float32, as ONNX defines it.

    Parameters of its kernel, in order, with D directions: products of the inputs with all biases but that of
    `has_bias`, (steps, batch, D * gates * hidden); weights of each phase, (D, panels, hidden, gates of the phase *
    `PANEL_COLUMNS`); recurrent bias, (D, hidden); initial states, (D, batch, hidden) each; peepholes, (D, 3, hidden);
    lengths, (batch,) of int64. Results: all outputs, (steps, D, batch, hidden), the last states, and two tensors of
    scratch.
    """

    op: str
    steps: Dim
    batch: Dim
    hidden: int
    backwards: tuple[bool, ...]  # whether a direction runs from the last step to the first
    activations: tuple[tuple[str, ...], ...]  # expressions of the activations, for each direction
    has_bias: bool = False  # whether the last gate has a bias of its recurrent product: that of `linear_before_reset`
    # Whether these operands are present.
    has_peepholes: bool = False
    has_lengths: bool = False
    # Attributes of GRU and LSTM.
    linear_before_reset: bool = False
    input_forget: bool = False

    @property
    def text(self) -> str:
        """The problem as JSON, the value of the attribute."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> RecurrenceProblem:
        """Problem of a PrimFunc with the attribute."""
        fields = json.loads(str(func.attrs[RECURRENCE]))
        fields["backwards"] = tuple(fields["backwards"])
        fields["activations"] = tuple(map(tuple, fields["activations"]))
        return cls(**fields)

    @property
    def directions(self) -> int:
        """Number of directions."""
        return len(self.backwards)

    @property
    def panels(self) -> int:
        """Number of panels of columns."""
        return ceil_div(self.hidden, PANEL_COLUMNS)

    @property
    def phases(self) -> tuple[int, ...]:
        """Number of gates of each recurrent product of a step: a reset before the product takes a second one."""
        return (2, 1) if self.op == "GRU" and not self.linear_before_reset else (GATES[self.op],)

    @property
    def step_operations(self) -> int:
        """Multiplications and additions of a step's recurrent products for one row of the batch."""
        return 2 * self.directions * GATES[self.op] * self.hidden**2

    @property
    def operands(self) -> dict[str, Operand]:
        """The kernel's parameters by name, in order."""
        directions, batch, hidden = self.directions, self.batch, self.hidden
        gates, states = GATES[self.op], ["hidden", "cell"][: 2 if self.op == "LSTM" else 1]
        state = ((directions, batch, hidden), "d m n")
        shapes: dict[str, tuple[tuple[Dim, ...], str]] = {
            "inputs": ((self.steps, batch, directions * gates * hidden), "t m n")
        }
        for phase, count in enumerate(self.phases):
            shapes[f"weights{phase}"] = ((directions, hidden, self.panels * count * PANEL_COLUMNS), "d k n")
        if self.has_bias:
            shapes["bias"] = ((directions, hidden), "d n")
        shapes |= {f"initial_{name}": state for name in states}
        if self.has_peepholes:
            shapes["peepholes"] = ((directions, 3, hidden), "d g n")
        if self.has_lengths:
            shapes["lengths"] = ((batch,), "m")
        shapes["outputs"] = ((self.steps, directions, batch, hidden), "t d m n")
        shapes |= {name: state for name in states}
        # Left operands of the phases, and the update gate of a GRU with two phases; sums of the products.
        shapes["factors"] = ((2 * len(self.phases) - 1, directions, batch, hidden), "p d m k")
        shapes["sums"] = ((directions, batch, self.panels * max(self.phases) * PANEL_COLUMNS), "d m n")
        return {name: self._operand(name, *shape) for name, shape in shapes.items()}

    def _operand(self, name: str, shape: tuple[Dim, ...], index_map: str) -> Operand:
        layout = PackedLayout.identity(len(shape))
        if name.startswith("weights"):
            layout = PackedLayout((0, 2, 1), (2,), (self.phases[int(name[-1])] * PANEL_COLUMNS,))
        return Operand(shape, "int64" if name == "lengths" else _DTYPE, tuple(index_map.split()), layout)


def recurrence_kernel(problem: RecurrenceProblem, cpu: CpuTarget | None = None) -> tirx.PrimFunc:
    """The kernel of a CPU; without one, a kernel without vectors for any device, with the attribute `RECURRENCE`."""
    with Function("recurrence") as function:
        kernel = _Kernel(function, problem, cpu or CpuTarget(INSTRUCTION_SETS[-1], frozenset(), 1, "llvm"))
        with function.body():
            kernel.open()
            kernel.emit()
    func = function.result.with_attr(BOUNDED, True)
    return func if cpu else func.with_attr(RECURRENCE, problem.text)


class RecurrentLayer:
    """Parameters of a recurrent layer's kernel, and the statements that the kernels of all devices share.

    Attributes
    ----------
    views : dict of (str, OperandView)
        Parameters by name.
    lanes : int
        Columns that `emit_gates` writes at once.
    """

    def __init__(self, function: Function, problem: RecurrenceProblem, lanes: int) -> None:
        self.problem, self.lanes = problem, lanes
        self.views = {name: OperandView(function, name, operand) for name, operand in problem.operands.items()}
        self.steps, _, self.batch, self.hidden = self.views["outputs"].extents
        extents = [self.steps, self.batch, problem.directions, GATES[problem.op], self.hidden]
        self.views["inputs"].restate(extents, "tmdgn", PackedLayout.identity(5))
        self.states = [name for name in ("hidden", "cell") if name in self.views]

    def open(self) -> None:
        """Declare the elements of all parameters."""
        for view in self.views.values():
            view.open()

    def mask(self, column: Expr) -> Expr | None:
        """Existing lanes of the vector at a column; None if all exist."""
        return lane_mask(self.hidden - column, self.lanes) if self.hidden % self.lanes else None

    def copy(self, source: str, target: str, at: Coordinates) -> None:
        """Copy a vector of states; "n" and "k" of its position are the column."""
        along, mask = self.views[target].index_map[-1], self.mask(at["n"])
        value = self.views[source].load(at, "n", self.lanes, mask)
        self.views[target].store(at, along, once(value), self.lanes, mask)

    def time(self, d: Expr, step: Expr) -> Expr:
        """The time step of a direction in a step of the loop."""
        if len(set(self.problem.backwards)) == 1:
            return self.steps - 1 - step if self.problem.backwards[0] else step
        return materialize(T.if_then_else(d < 1, step, self.steps - 1 - step))

    def packed_column(self, phase: int, gate: int, n: Expr) -> Expr:
        """Column of a gate in the packed weights and sums of a phase."""
        panel, gates = PANEL_COLUMNS, self.problem.phases[phase]
        return materialize((n // panel * gates + gate) * panel + n % panel)

    def emit_gates(self, phase: int, at: Coordinates) -> None:
        """Write the new states of a vector of columns, from the sums of a phase."""
        first, *others = self.problem.activations

        def write(activations: tuple[str, ...]) -> Callable[[], None]:
            return lambda: self._update(_Cell(self, phase, at, activations))

        either(at["d"] < 1 if set(others) - {first} else True, write(first), write(self.problem.activations[-1]))

    def _update(self, cell: _Cell) -> None:
        """Store the new states and the output of a vector; an ended sequence keeps its states and outputs zeros."""
        states = {"LSTM": cell.lstm, "GRU": cell.gru, "RNN": cell.rnn}[self.problem.op]()
        if not states:
            return
        output = states["hidden"]
        if "lengths" in self.views:
            lengths = self.views["lengths"]
            is_active = broadcast(lengths.data[lengths.address(cell.at)] > cell.at["t"], self.lanes)
            states = {name: once(T.Select(is_active, value, cell.load(name))) for name, value in states.items()}
            output = once(T.Select(is_active, output, zeros(_DTYPE, self.lanes)))
        for name, value in {**states, "outputs": output}.items():
            cell.store(name, value)


class _Kernel(RecurrentLayer):
    """Statements of a CPU's kernel."""

    def __init__(self, function: Function, problem: RecurrenceProblem, cpu: CpuTarget) -> None:
        super().__init__(function, problem, cpu.lanes(_DTYPE))
        self._cpu = cpu
        self._specs = [self._spec(phase) for phase in range(len(problem.phases))]
        vectors = [gates * PANEL_COLUMNS // self.lanes for gates in problem.phases]
        self._panels = [self._panels_per_tile(count) for count in vectors]
        self._vectors = [count * panels for count, panels in zip(vectors, self._panels, strict=True)]
        self._rows = self._tile_rows(max(self._vectors))

    def _spec(self, phase: int) -> MatmulSpec:
        """The recurrent product of a phase."""
        dot = dot_instruction_for(self._cpu, _DTYPE, _DTYPE, _DTYPE)
        assert dot is not None, "every CPU multiplies float32"
        weights, registers = self.views[f"weights{phase}"], self._cpu.isa.registers - 1 - dot.temporaries
        sizes = self.batch, weights.extents[2], self.hidden
        epilogue = EpilogueCode(Expression.operand(0), (), _DTYPE, _DTYPE, self.lanes)
        operands = self.views["factors"], weights, self.views["sums"]
        return MatmulSpec(*operands, None, epilogue, dot, self.lanes, registers, *sizes)

    def _tile_rows(self, vectors: int) -> int:
        """Rows of a register tile; a static batch has tiles of equal sizes."""
        rows = max(1, min(tile_sizes(self._cpu).rows, self._specs[0].registers // vectors - 1))
        return ceil_div(self.batch, ceil_div(self.batch, rows)) if isinstance(self.batch, int) else rows

    def _panels_per_tile(self, vectors: int) -> int:
        """Panels of a register tile: a divisor of their number."""
        limit = max(1, TILE_VECTORS // vectors)
        return next(count for count in range(limit, 0, -1) if self.problem.panels % count == 0)

    def emit(self) -> None:
        """Write the kernel: cores share the columns of a step with much work, else directions and rows."""
        problem, cores = self.problem, self._cpu.cores
        known_rows = self.batch if isinstance(self.batch, int) else 1
        step_work = max(known_rows, MIN_COMPUTE_BOUND_ROWS) * problem.step_operations // 2
        if problem.directions < cores and tasks_for(cores, "multiply-adds", step_work) > 1:
            self._emit_shared_steps()
            return
        is_static = isinstance(self.batch, int) and isinstance(self.steps, int)
        workers = tasks_for(cores, "multiply-adds", step_work * self.steps if is_static else None)
        tiles = materialize(ceil_div(self.batch, self._rows))
        blocks = ceil_div(workers, problem.directions)
        blocks = min(blocks, tiles) if isinstance(tiles, int) else blocks
        tasks = problem.directions * blocks
        with loop(tasks, parallel=tasks > 1 and workers > 1) as task:
            d, accs = materialize(task // blocks), self._accumulators()
            block = part(tiles, blocks, task % blocks)
            self._copy_states(d, block)
            with loop(self.steps) as step:
                self._copy(d, block, "hidden", "factors")
                for phase, panels in enumerate(self._panels):
                    groups = problem.panels // panels
                    with loop(groups) as number:
                        self._emit_group(phase, d, step, block, _serpentine(number, groups, step), accs)

    def _emit_shared_steps(self) -> None:
        """Write the kernel with the columns of all directions shared by the cores, in each step."""
        problem, cores = self.problem, self._cpu.cores
        tiles = 0, materialize(ceil_div(self.batch, self._rows))
        with loop(problem.directions) as d:
            self._copy_states(d, tiles)
        with loop(self.steps) as step:
            with loop(problem.directions) as d:
                self._copy(d, tiles, "hidden", "factors")
            for phase, panels in enumerate(self._panels):
                groups = problem.panels // panels
                with loop(cores, parallel=True) as task:
                    accs = self._accumulators()
                    first, last = part(problem.directions * groups, cores, task)
                    with loop(last - first) as number:
                        unit = materialize(first + _serpentine(number, last - first, step))
                        self._emit_group(phase, materialize(unit // groups), step, tiles, unit % groups, accs)

    def _accumulators(self) -> Registers:
        count = max(accumulator_count(self._specs[0].dot, self._rows, vectors) for vectors in self._vectors)
        return Registers(count, _DTYPE, self.lanes)

    def _copy_states(self, d: Expr, tiles: tuple[Expr, Expr]) -> None:
        for name in self.states:
            self._copy(d, tiles, f"initial_{name}", name)

    def _copy(self, d: Expr, tiles: tuple[Expr, Expr], source: str, target: str) -> None:
        """Copy the rows of some tiles from one tensor of states to another."""
        first, last = (materialize(minimum(tile * self._rows, self.batch)) for tile in tiles)
        with loop(last - first) as row, loop(ceil_div(self.hidden, self.lanes)) as vector:
            n = materialize(vector * self.lanes)
            self.copy(source, target, {"p": _ZERO, "d": d, "m": materialize(first + row), "n": n, "k": n})

    def _emit_group(
        self, phase: int, d: Expr, step: Expr, tiles: tuple[Expr, Expr], group: Expr, accs: Registers
    ) -> None:
        """Write the product and the gates of the panels of a register tile, for a range of tiles of rows."""
        spec, gates, vectors = self._specs[phase], self.problem.phases[phase], self._vectors[phase]
        batch: Coordinates = {"d": d, "p": tirx.const(phase, "int64")}
        column = materialize(group * (vectors * self.lanes))
        k = KRange(0, self.hidden, True, True)
        with loop(tiles[1] - tiles[0]) as number:
            row = materialize((tiles[0] + number) * self._rows)
            emit_cases(
                row_cases(self.batch, row, self._rows),
                lambda rows, end: emit_tile(
                    spec, make_tile(spec, batch, (row, column), (rows, vectors), (end, None), None), k, accs
                ),
            )
            existing = materialize(minimum(self.batch - row, self._rows))
            with loop(existing) as i, loop(vectors // gates) as vector:
                n = materialize(group * (vectors // gates * self.lanes) + vector * self.lanes)
                at = {"d": d, "t": self.time(d, step), "m": materialize(row + i), "n": n, "k": n}
                with when(n < self.hidden if self.hidden % PANEL_COLUMNS else True):
                    self.emit_gates(phase, at)


def _serpentine(number: Expr, count: Expr, step: Expr) -> Expr:
    """Numbers from 0 on in even steps, down to 0 in odd ones: weights that were read last are in caches still."""
    return materialize(T.if_then_else(step % 2 < 1, number, count - 1 - number))


_ZERO = tirx.const(0, "int64")


class _Cell:
    """The gates of a vector of columns.

    Attributes
    ----------
    at : Coordinates
        Direction, time, row of the batch, and column.
    """

    def __init__(self, layer: RecurrentLayer, phase: int, at: Coordinates, activations: Sequence[str]) -> None:
        self._layer, self._phase, self.at, self._activations = layer, phase, at, activations
        self._problem, self._views, self._lanes = layer.problem, layer.views, layer.lanes
        self._mask = layer.mask(at["n"])

    def load(self, name: str, **at: int) -> Expr:
        """A vector of an operand, at other coordinates than the cell's where given."""
        view = self._views[name]
        return once(view.load(self._position(at), view.index_map[-1], self._lanes, self._mask))

    def store(self, name: str, value: Expr, **at: int) -> None:
        """Write a vector of a result."""
        view = self._views[name]
        view.store(self._position(at), view.index_map[-1], value, self._lanes, self._mask)

    def _position(self, at: dict[str, int]) -> Coordinates:
        return {**self.at, **{dim: tirx.const(index, "int64") for dim, index in at.items()}}

    def product(self, gate: int) -> Expr:
        """The recurrent product of a gate of the phase."""
        column = self._layer.packed_column(self._phase, gate, self.at["n"])
        return self._views["sums"].load({**self.at, "n": column}, "n", self._lanes)

    def sum(self, gate: int) -> Expr:
        """The argument of a gate's activation."""
        return once(self.load("inputs", g=gate) + self.product(gate))

    def activate(self, index: int, value: Expr) -> Expr:
        """Activation `index` of a value."""
        return emit(Expression.parse(self._activations[index]), [value], [_DTYPE], self._lanes, lambda _: _GATE_OPS)

    def rnn(self) -> dict[str, Expr]:
        """New state of an RNN."""
        return {"hidden": self.activate(0, self.sum(0))}

    def gru(self) -> dict[str, Expr]:
        """New state of a GRU; empty in a phase that computes the reset state."""
        old = self.load("hidden")
        if self._phase == 0:
            update, reset = (self.activate(0, self.sum(gate)) for gate in (0, 1))
            if not self._problem.linear_before_reset:
                self.store("factors", once(reset * old), p=1)
                self.store("factors", update, p=2)
                return {}
            product = self.product(2)
            product = product + self.load("bias") if self._problem.has_bias else product
            argument = self.load("inputs", g=2) + reset * product
        else:
            update, argument = self.load("factors", p=2), self.load("inputs", g=2) + self.product(0)
        new = self.activate(1, once(argument))
        return {"hidden": once((constant(update, 1) - update) * new + update * old)}

    def lstm(self) -> dict[str, Expr]:
        """New states of an LSTM, whose gates are i, o, f, c in ONNX's order; o's peephole reads the new cell."""
        cell, has_peepholes = self.load("cell"), self._problem.has_peepholes
        i, o, f, c = (self.sum(gate) for gate in range(4))
        if has_peepholes:
            i, f = i + self.load("peepholes", g=0) * cell, f + self.load("peepholes", g=2) * cell
        i = self.activate(0, i)
        f = constant(i, 1) - i if self._problem.input_forget else self.activate(0, f)
        new_cell = once(f * cell + i * self.activate(1, c))
        if has_peepholes:
            o = o + self.load("peepholes", g=1) * new_cell
        return {"hidden": once(self.activate(0, o) * self.activate(2, new_cell)), "cell": new_cell}
