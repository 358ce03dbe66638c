"""Chains of small kernels that are not fused; results are exact, so a missing or misplaced kernel shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx

import relax_hetero as rh

WIDTH = 16
# TVM's pattern of a kernel that is never fused (kOpaque).
_OPAQUE = 8


@dataclass(frozen=True)
class Chain:
    """A chain of kernels: each adds a number to the last result, or subtracts that from a number.

    Attributes
    ----------
    kernels : int
        Number of calls of ``main``, which takes one float32 tensor of `WIDTH` elements.
    distinct : int
        Number of different kernels, which are called in turn.
    grows : bool
        If true, each result has one more element, a copy of its operand's last, so that no two kernels are equal.
    symbolic : bool
        If true, the number of elements is symbolic.
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
                for index, out_type in enumerate(types[1:]):
                    value = builder.emit(relax.op.call_tir(steps[index % self.distinct], [value], out_type))
                value = builder.emit_output(value)
            builder.emit_func_output(value)
        return builder.get()

    def result(self, x: np.ndarray) -> np.ndarray:
        """The exact result of `main` for `x`."""
        for index in range(self.kernels):
            add, negate = step(index % self.distinct)
            x = np.append(x, x[-1:]) if self.grows else x
            x = np.float32(add) - x if negate else x + np.float32(add)
        return x

    def record(self, machine: rh.vm.VirtualMachine, extent: int) -> rh.vm.CommandBuffer:
        """Record the chain by hand from the kernels of a machine: slot 0 is read, slot 1 written."""
        buffer = rh.vm.CommandBuffer(machine, slots=2)
        scratch = [buffer.buffer(tvm.runtime.empty((extent,), "float32")) for _ in range(2)]
        places = [buffer.slot(0), *(scratch[index % 2] for index in range(self.kernels - 1)), buffer.slot(1)]
        buffer.begin()
        for index in range(self.kernels):
            extents = [extent] if self.symbolic else []
            buffer.dispatch(f"step_{index % self.distinct}", 1, places[index : index + 2], extents)
        buffer.end()
        return buffer

    def _kernel(self, index: int, in_extent: int, out_extent: int) -> tirx.PrimFunc:
        add, negate = step(index)
        extent = te.var("n", "int64") if self.symbolic else tirx.const(in_extent, "int64")
        x = te.placeholder((extent,), "float32", "x")

        def element(i: tirx.Var) -> tirx.PrimExpr:
            value, constant = x[te.min(i, extent - 1) if self.grows else i], tirx.const(add, "float32")
            return constant - value if negate else value + constant

        y = te.compute((tirx.const(out_extent, "int64") if self.grows else extent,), element, "y")
        return te.create_prim_func([x, y]).with_attr({"op_pattern": _OPAQUE, "global_symbol": f"step_{index}"})


def step(index: int) -> tuple[float, bool]:
    """The number that a kernel adds, and true if it negates first; integers that keep all sums below 2 ** 24."""
    return float((index % 64) ** 2 + 1), index % 2 == 1


def whole_numbers(seed: int, extent: int = WIDTH) -> np.ndarray:
    """An argument for a chain."""
    return np.random.default_rng(seed).integers(-999, 1000, extent).astype("float32")
