"""Random graphs of matrix products and elementwise work over several devices: numpy's numbers, bit for bit.

All values are small integers, so that any order of additions gives the same float32, and nothing is close to right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.support.cc import get_cc

import relax_hetero as rh

LARGEST = 2**20  # float32 holds every integer up to 2**24; sums of a few values stay below
TARGETS = [rh.native("llvm"), {"kind": "llvm", "mcpu": "x86-64-v3"}, {"kind": "llvm"}, *(["c"] if get_cc() else [])]


@dataclass(frozen=True)
class Extent:
    """Extent of a dimension: `size` at run time; `dim` is a variable if symbolic. Equal extents are one object."""

    dim: Any
    size: int


@dataclass(frozen=True)
class Value:
    expr: relax.Expr
    array: np.ndarray
    extents: tuple[Extent, ...]
    device: int


class Graph:
    """A module that grows op by op, with what each value is in numpy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        chosen = self.rng.choice(len(TARGETS), min(len(TARGETS), int(self.rng.integers(1, 4))), replace=False)
        # Devices of one number share memory, though their targets differ.
        self.vdevices = [rh.VDevice(TARGETS[i], int(self.rng.integers(0, 2))) for i in chosen]
        symbolic = self.rng.random() < 0.5
        self.extents = [
            Extent(tvm.tirx.Var(f"s{i}", "int64") if symbolic and self.rng.random() < 0.6 else int(size), int(size))
            for i, size in enumerate(self.rng.choice([1, 2, 3, 5, 8, 16, 17, 33], 3))
        ]
        module = tvm.IRModule()
        module.update_global_info("vdevice", self.vdevices)
        self.builder = relax.BlockBuilder(module)
        ranks = [1, 2, 2, 2, 2, 2, 3, 3]
        self.inputs = [self.parameter(i, tuple(self.pick(self.extents) for _ in range(r))) for i, r in enumerate(ranks)]
        self.values = list(self.inputs)

    def pick(self, items: list[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def integers(self, extents: tuple[Extent, ...]) -> np.ndarray:
        return self.rng.integers(-3, 4, [e.size for e in extents]).astype("float32")

    def parameter(self, number: int, extents: tuple[Extent, ...]) -> Value:
        device = int(self.rng.integers(len(self.vdevices)))
        ty = relax.TensorType([e.dim for e in extents], "float32", self.vdevices[device])
        return Value(relax.Var(f"p{number}", ty), self.integers(extents), extents, device)

    def constant(self, extents: tuple[Extent, ...], device: int) -> Value:
        array = self.integers(extents)
        return Value(relax.const(array), array, extents, device)

    def add(self, call: relax.Expr, array: np.ndarray, extents: tuple[Extent, ...], device: int) -> Value:
        self.values.append(Value(self.builder.emit(call), array, extents, device))
        return self.values[-1]

    def moved(self, value: Value, device: int) -> Value:
        if value.device == device or not isinstance(value.expr, relax.Var):
            return value
        return self.add(relax.op.to_vdevice(value.expr, self.vdevices[device]), value.array, value.extents, device)

    # Random steps: each takes a value and may find nothing to do.

    def product(self, lhs: Value) -> None:
        k, batch = lhs.extents[-1], lhs.extents[:-2]
        fitting = [v for v in self.values if len(v.extents) == 1 and v.extents[0] is k]
        fitting += [
            v
            for v in self.values
            if len(v.extents) > 1 and v.extents[-2] is k and (not batch or v.extents[:-2] in ((), batch))
        ]
        if fitting and self.rng.random() < 0.6:
            rhs = self.moved(self.pick(fitting), lhs.device)
        elif isinstance(k.dim, int):
            n = int(self.pick([1, 3, 8, 20, 70]))
            rhs = self.constant((k, Extent(n, n)), lhs.device)
        else:
            return
        array = np.matmul(lhs.array, rhs.array)
        if np.abs(array).max(initial=0) < LARGEST:
            extents = (*(batch or rhs.extents[:-2]), *lhs.extents[-2:-1], *rhs.extents[-1:][: len(rhs.extents) - 1])
            self.add(relax.op.matmul(lhs.expr, rhs.expr), array, extents, lhs.device)

    def sum(self, value: Value) -> None:
        alike = [v for v in self.values if v.extents == value.extents]
        other = self.moved(self.pick(alike), value.device)
        if np.abs(value.array).max(initial=0) + np.abs(other.array).max(initial=0) < LARGEST:
            call = relax.op.add(other.expr, value.expr)
            self.add(call, other.array + value.array, value.extents, value.device)

    def bias(self, value: Value) -> None:
        if isinstance(value.extents[-1].dim, int):
            bias = self.constant(value.extents[-1:], value.device)
            call = relax.op.subtract(bias.expr, value.expr)
            self.add(call, bias.array - value.array, value.extents, value.device)

    def relu(self, value: Value) -> None:
        self.add(relax.op.nn.relu(value.expr), np.maximum(value.array, 0), value.extents, value.device)

    def permute(self, value: Value) -> None:
        axes = [int(axis) for axis in self.rng.permutation(len(value.extents))]
        extents = tuple(value.extents[axis] for axis in axes)
        self.add(relax.op.permute_dims(value.expr, axes), value.array.transpose(axes), extents, value.device)

    def merge(self, value: Value) -> None:
        if len(value.extents) == 3:
            b, m, k = value.extents
            rows = Extent(b.dim * m.dim, b.size * m.size)
            call = relax.op.reshape(value.expr, (rows.dim, k.dim))
            self.add(call, value.array.reshape(rows.size, k.size), (rows, k), value.device)

    def move(self, value: Value) -> None:
        self.moved(value, int(self.rng.integers(len(self.vdevices))))

    def grow(self, steps: int) -> tuple[tvm.IRModule, list[Value]]:
        """The module, and what it returns."""
        ways: list[Callable[[Value], None]] = [self.product] * 5
        ways += [self.sum, self.bias, self.relu, self.permute, self.merge, self.move]
        with self.builder.function("main", [value.expr for value in self.inputs]):
            with self.builder.dataflow():
                self.product(self.constant((self.pick(self.extents),), 0))
                for _ in range(steps):
                    self.pick(ways)(self.pick([v for v in self.values[-4:] if v.extents]))
                results = [v for v in self.values[-3:] if v not in self.inputs] or [self.moved_input()]
                outputs = self.builder.emit_output(relax.Tuple([value.expr for value in results]))
            self.builder.emit_func_output(outputs)
        return self.builder.get(), results

    def moved_input(self) -> Value:
        value = self.inputs[0]
        return self.add(relax.op.nn.relu(value.expr), np.maximum(value.array, 0), value.extents, value.device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(14))
def test_exactly_numpy_s_numbers(seed: int):
    graph = Graph(seed)
    module, results = graph.grow(steps=10)
    executable = rh.compile(module)
    actual = rh.vm.VirtualMachine(executable)["main"](*(value.array for value in graph.inputs))
    for tensor, value in zip(actual if isinstance(actual, tuple) else (actual,), results, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), value.array)
    encoded = [op for op in executable.metadata.encodings["ops"] if op["op"] == "matmul"]
    # A pass may drop what nobody reads.
    live = products(relax.transform.DeadCodeElimination()(module))
    assert live <= len(encoded) <= products(module) and not executable.metadata.encodings["cancelled"]


def products(module: tvm.IRModule) -> int:
    """Number of products."""
    bindings = [binding for block in module["main"].body.blocks for binding in block.bindings]
    called = [binding.value.op for binding in bindings if isinstance(binding.value, relax.Call)]
    return sum(isinstance(op, tvm.ir.Op) and op.name == "relax.matmul" for op in called)
