"""Recurrent layers that are placed on a GPU after the import: a block per direction and row of the batch.

A thread computes whole columns, one after another. Imports for GPUs unroll layers instead, or make loops of them: their
products are shared by all multiprocessors.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...core.builder import Function, Registers, ceil_div, int64, loop, materialize, when
from ...core.view import Coordinates
from ...recurrence import RecurrenceProblem, RecurrentLayer
from .launch import launch, scheduled_as, sync

_THREADS = 256


def recurrence_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """GPU kernel of a PrimFunc with the attribute `RECURRENCE`."""
    function = Function("recurrence", registers="local")
    with function:
        kernel = _Kernel(function, RecurrenceProblem.of(func), lanes=1)
        with function.body():
            kernel.emit()
    return scheduled_as(func, function.result)


class _Kernel(RecurrentLayer):
    """Statements of a block."""

    def emit(self) -> None:
        """Write the kernel."""
        rows, directions = self.batch, self.problem.directions
        with launch(rows * directions, _THREADS) as (block, thread):
            self.open()  # computes strides, in registers of the thread
            with when(block < rows * directions):
                d = materialize(block // (rows if isinstance(rows, int) else T.max(rows, int64(1))))
                self._emit_steps({"p": int64(0), "d": d, "m": materialize(block - d * rows)}, thread)

    def _emit_steps(self, row: Coordinates, thread: tirx.Expr) -> None:
        columns = ceil_div(self.hidden, _THREADS)

        def copy(source: str, target: str) -> None:
            with loop(columns) as i:
                n = materialize(i * _THREADS + thread)
                with when(n < self.hidden):
                    self.copy(source, target, {**row, "n": n, "k": n})

        for name in self.states:
            copy(f"initial_{name}", name)
        with loop(self.steps) as step:
            time = materialize(self.time(row["d"], step))
            copy("hidden", "factors")
            sync()
            for phase in range(len(self.problem.phases)):
                with loop(columns) as i:
                    n = materialize(i * _THREADS + thread)
                    with when(n < self.hidden):
                        at = {**row, "t": time, "n": n, "k": n}
                        self._emit_products(phase, {**at, "p": int64(phase)})
                        self.emit_gates(phase, at)
                sync()

    def _emit_products(self, phase: int, at: Coordinates) -> None:
        """Write the sums of a column's gates."""
        gates = self.problem.phases[phase]
        columns = [self.packed_column(phase, gate, at["n"]) for gate in range(gates)]
        sums = Registers(gates, "float32", 1)
        for gate in range(gates):
            sums[gate] = tirx.const(0, "float32")
        with loop(self.hidden) as k:
            factor = T.bind(self.views["factors"].load({**at, "k": k}, "k", 1))
            for gate, column in enumerate(columns):
                weight = self.views[f"weights{phase}"].load({**at, "k": k, "n": column}, "n", 1)
                sums[gate] = sums[gate] + factor * weight
        for gate, column in enumerate(columns):
            self.views["sums"].store({**at, "n": column}, "n", sums[gate], 1)
