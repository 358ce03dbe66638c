"""Chains of small kernels that nothing fuses: exact in float32, and a kernel left out or out of order shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx

import relax_hetero as rh

WIDTH = 16
# TVM's pattern of a kernel that is fused with no other.
_OPAQUE = 8


@dataclass(frozen=True)
class Chain:
    """Kernels in a row, each of which adds a number to what the one before made, or subtracts that from a number.

    Attributes
    ----------
    kernels : int
        How many calls ``main`` makes; it takes one float32 tensor of `WIDTH` elements.
    distinct : int
        How many different kernels take turns in them.
    grows : bool
        Whether each makes one element more than it takes, a copy of its last, so that no two are alike.
    symbolic : bool
        Whether the tensor has any number of elements.
    """

    kernels: int
    distinct: int = 4
    grows: bool = False
    symbolic: bool = False

    def __post_init__(self) -> None:
        if self.grows and (self.symbolic or self.distinct < self.kernels):
            raise ValueError("kernels of a chain that grows are all distinct, and their extents are numbers")

    def module(self) -> tvm.IRModule:
        """The chain as a Relax module."""
        builder = relax.BlockBuilder()
        extents = [WIDTH + index if self.grows else WIDTH for index in range(self.kernels + 1)]
        steps = [
            builder.add_func(self._kernel(index, *extents[index : index + 2]), f"step_{index}")
            for index in range(min(self.distinct, self.kernels))
        ]
        n = tirx.Var("n", "int64")
        types = [relax.TensorType((n if self.symbolic else extent,), "float32") for extent in extents]
        x = relax.Var("x", types[0])
        with builder.function("main", [x]):
            with builder.dataflow():
                value = x
                for index, made in enumerate(types[1:]):
                    value = builder.emit(relax.op.call_tir(steps[index % self.distinct], [value], made))
                value = builder.emit_output(value)
            builder.emit_func_output(value)
        return builder.get()

    def result(self, x: np.ndarray) -> np.ndarray:
        """What `main` returns for `x`, to the last bit."""
        for index in range(self.kernels):
            add, negate = step(index % self.distinct)
            x = np.append(x, x[-1:]) if self.grows else x
            x = np.float32(add) - x if negate else x + np.float32(add)
        return x

    def record(self, machine: rh.vm.VirtualMachine, extent: int) -> rh.vm.CommandBuffer:
        """The chain recorded by hand, of the kernels of a machine that has it: slot 0 is read, slot 1 written."""
        buffer = rh.vm.CommandBuffer(machine, slots=2)
        scratch = [buffer.buffer(tvm.runtime.empty((extent,), "float32")) for _ in range(2)]
        places = [buffer.slot(0), *(scratch[index % 2] for index in range(self.kernels - 1)), buffer.slot(1)]
        buffer.begin()
        for index in range(self.kernels):
            extents = [extent] if self.symbolic else []
            buffer.dispatch(f"step_{index % self.distinct}", 1, places[index : index + 2], extents)
        buffer.end()
        return buffer

    def _kernel(self, index: int, taken: int, made: int) -> tirx.PrimFunc:
        add, negate = step(index)
        extent = te.var("n", "int64") if self.symbolic else tirx.const(taken, "int64")
        x = te.placeholder((extent,), "float32", "x")

        def element(i: tirx.Var) -> tirx.PrimExpr:
            value, constant = x[te.min(i, extent - 1) if self.grows else i], tirx.const(add, "float32")
            return constant - value if negate else value + constant

        y = te.compute((tirx.const(made, "int64") if self.grows else extent,), element, "y")
        return te.create_prim_func([x, y]).with_attr({"op_pattern": _OPAQUE, "global_symbol": f"step_{index}"})


def step(index: int) -> tuple[float, bool]:
    """What a kernel adds, and whether it negates before; whole numbers that leave all sums below 2 ** 24."""
    return float((index % 64) ** 2 + 1), index % 2 == 1


def whole_numbers(seed: int, extent: int = WIDTH) -> np.ndarray:
    """An argument for a chain."""
    return np.random.default_rng(seed).integers(-999, 1000, extent).astype("float32")
