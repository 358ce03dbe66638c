"""Memory that a kernel overwrites in place is its own: random programs of names, copies and writes against numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import IsolateWrites, RealizeVDevice
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}
SHAPE = (2, 2)


@I.ir_module
class Kernels:
    @T.prim_func(private=True, s_tir=True)
    def bump(a: T.Buffer((T.int64(2), T.int64(2)), "float32")):
        for i, j in T.grid(T.int64(2), T.int64(2)):
            with T.sblock("bump"):
                v, w = T.axis.remap("SS", [i, j])
                a[v, w] = a[v, w] + T.float32(100)

    @T.prim_func(private=True, s_tir=True)
    def plus(a: T.Buffer((T.int64(2), T.int64(2)), "float32"), b: T.Buffer((T.int64(2), T.int64(2)), "float32")):
        for i, j in T.grid(T.int64(2), T.int64(2)):
            with T.sblock("plus"):
                v, w = T.axis.remap("SS", [i, j])
                a[v, w] = a[v, w] + b[v, w]

    @T.prim_func(private=True, s_tir=True)
    def same(a: T.Buffer((T.int64(2), T.int64(2)), "float32"), b: T.Buffer((T.int64(2), T.int64(2)), "float32")):
        for i, j in T.grid(T.int64(2), T.int64(2)):
            with T.sblock("same"):
                v, w = T.axis.remap("SS", [i, j])
                b[v, w] = a[v, w]


def test_a_shared_value_is_copied_and_a_write_does_not_pass_a_read():
    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def bump(a: T.Buffer((T.int64(4),), "float32")):
            for i in range(T.int64(4)):
                a[i] = a[i] + T.float32(100)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                y = R.permute_dims(x, [0])
                z = R.call_tir_inplace(cls.bump, (y,), [0], out_ty=R.Tensor((4,), "float32", "llvm:0"))
                e = R.exp(x)
                doubled = R.add(e, e)
                w = R.call_tir_inplace(cls.bump, (e,), [0], out_ty=R.Tensor((4,), "float32", "llvm:0"))
                result = R.add(doubled, w)
                R.output(z, result)
            return (z, result)

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def bump(a: T.Buffer((T.int64(4),), "float32")):
            for i in range(T.int64(4)):
                a[i] = a[i] + T.float32(100)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Expected
            with R.dataflow():
                y_shared = R.permute_dims(x, [0])
                y = R.hetero.copy(y_shared)
                z = R.call_tir_inplace(cls.bump, (y,), [0], out_ty=R.Tensor((4,), "float32", "llvm:0"))
                e = R.exp(x)
                doubled = R.add(e, e)
                R.output(z, e, doubled)
            w = R.call_tir_inplace(cls.bump, (e,), [0], out_ty=R.Tensor((4,), "float32", "llvm:0"))
            with R.dataflow():
                result = R.add(doubled, w)
                R.output(result)
            return (z, result)

    after = IsolateWrites()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert IsolateWrites()(after).same_as(after)


def test_a_value_without_other_readers_is_overwritten_in_place():
    @I.ir_module
    class Own:
        @T.prim_func(private=True, s_tir=True)
        def bump(a: T.Buffer((T.int64(4),), "float32")):
            for i in range(T.int64(4)):
                a[i] = a[i] + T.float32(100)

        @R.function
        def main(x: R.Tensor((2, 2), "float32"), cache: R.Tensor((4,), "float32")):
            cls = Own
            with R.dataflow():
                flat = R.reshape(R.exp(x), (4,))
                y = R.call_tir_inplace(cls.bump, (flat,), [0], out_ty=R.Tensor((4,), "float32"))
                new = R.call_tir_inplace(cls.bump, (cache,), [0], out_ty=R.Tensor((4,), "float32"))
                z = R.add(y, new)
                R.output(z, new)
            return (z, new)

        @R.function
        def writes_nothing(x: R.Tensor((2, 2), "float32")):
            return R.permute_dims(x, [1, 0])

    assert IsolateWrites()(Own).same_as(Own)


def test_a_transfer_to_where_a_value_is_copies_in_a_module_that_writes_in_place():
    @ir_module(V4)
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def bump(a: T.Buffer((T.int64(4),), "float32")):
            for i in range(T.int64(4)):
                a[i] = a[i] + T.float32(100)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Mod
            with R.dataflow():
                y = R.to_vdevice(x, "llvm:0")
                z = R.call_tir_inplace(cls.bump, (y,), [0], out_ty=R.Tensor((4,), "float32", "llvm:0"))
                w = R.add(x, z)
                R.output(z, w)
            return (z, w)

    placed = RealizeVDevice()(Mod)
    assert placed["main"].body.blocks[0].bindings[0].value.op.name == "relax.hetero.copy"
    for mod in (Mod, placed):
        z, w = rh.vm.VirtualMachine(rh.compile(mod))["main"](np.ones(4, "float32"))
        assert (z.numpy() == 101).all() and (w.numpy() == 102).all()


class Program:
    """A random program of names, copies and kernels in place, and its meaning.

    A tensor that was overwritten is known by the result of the kernel only, as Relax demands.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)][: self.random.randint(1, 2)]
        self.builder = relax.BlockBuilder(Kernels)
        self.steps: list[tuple] = []
        self.inputs = [relax.Var(name, self.type_on(0)) for name in ("x", "y")]
        condition = relax.Var("condition", relax.TensorType((), "bool", self.devices[0]))
        # (variable, device), and the numbers of the tensors that it may be, fewer where one was overwritten.
        self.values = [(var, 0) for var in self.inputs]
        self.tensors = [{0}, {1}]
        self.alive = [True, True]
        with self.builder.function("main", [*self.inputs, condition], {"global_symbol": "main"}):
            for _ in range(self.random.randint(1, 3)):
                self.stretch(self.random.random() < 0.6, condition)
            live = [number for number, alive in enumerate(self.alive) if alive]
            self.results = live if self.random.random() < 0.5 else self.random.sample(live, min(3, len(live)))
            self.builder.emit_func_output(
                self.builder.emit(relax.Tuple([self.values[number][0] for number in self.results]))
            )
        self.module = self.builder.get()
        self.module.update_global_info("vdevice", self.devices)

    def type_on(self, device: int) -> relax.TensorType:
        return relax.TensorType(SHAPE, "float32", self.devices[device])

    def stretch(self, is_dataflow: bool, condition: relax.Var) -> None:
        count = self.random.randint(2, 6)
        if not is_dataflow:
            for _ in range(count):
                self.step(condition)
            return
        first = len(self.values)
        with self.builder.dataflow():
            for _ in range(count):
                self.step(None)
            for number in range(first, len(self.values)):
                var, device = self.values[number]
                self.values[number] = (self.builder.emit_output(var), device)

    def step(self, condition: relax.Var | None) -> None:
        kinds = "bump bump plus move order turned form name add same field negative view constant zeros cast".split()
        kind = self.random.choice(kinds if condition is None else [*kinds, "branch", "branch"])
        number = self.random.choice([n for n, alive in enumerate(self.alive) if alive])
        var, device = self.values[number]
        here = [n for n, (_, d) in enumerate(self.values) if d == device and self.alive[n]]
        if kind == "plus":
            here = [n for n in here if not self.tensors[n] & self.tensors[number]]
            if not here:
                return
        other = self.random.choice(here)
        if kind == "move":
            device = self.random.randrange(len(self.devices))
        value = self.value(kind, var, self.values[other][0], device, condition)
        tensors = {len(self.values)}
        if kind in ("bump", "plus", "name", "field", "view"):
            tensors = set(self.tensors[number])
        elif kind == "branch":
            tensors = self.tensors[number] | self.tensors[other]
        if kind in ("bump", "plus"):
            self.alive = [alive and not (self.tensors[n] & tensors) for n, alive in enumerate(self.alive)]
        self.steps.append((kind, number, other))
        self.values.append((value, device))
        self.tensors.append(tensors)
        self.alive.append(True)

    def value(self, kind: str, var: relax.Var, other: relax.Var, device: int, condition: relax.Var | None) -> relax.Var:
        emit, op, ty = self.builder.emit, relax.op, self.type_on(device)
        kernel = {name: Kernels.get_global_var(name) for name in ("bump", "plus", "same")}.get(kind)
        if kind == "branch":
            return emit(branch(condition, var, other))
        if kind == "field":
            return emit(relax.TupleGetItem(emit(relax.Tuple([var, other])), 0))
        if kind in ("constant", "zeros"):
            source = relax.const(np.full(SHAPE, 7, "float32")) if kind == "constant" else op.zeros(SHAPE, "float32")
            return emit(op.to_vdevice(emit(source), self.devices[device]))
        return emit(
            {
                "bump": lambda: op.call_tir_inplace(kernel, (var,), [0], ty),
                "plus": lambda: op.call_tir_inplace(kernel, (var, other), [0], ty),
                "same": lambda: relax.call_tir(kernel, (var,), ty),
                "move": lambda: op.to_vdevice(var, self.devices[device]),
                "order": lambda: op.permute_dims(var, [0, 1]),
                "turned": lambda: op.permute_dims(var, [1, 0]),
                "form": lambda: op.reshape(emit(op.reshape(var, (4,))), SHAPE),
                "cast": lambda: op.squeeze(emit(op.expand_dims(emit(op.astype(var, "float32")), [0])), [0]),
                "name": lambda: var,
                "view": lambda: op.memory.view(var, SHAPE, "float32"),
                "add": lambda: op.add(var, other),
                "negative": lambda: op.negative(var),
            }[kind]()
        )

    def meaning(self, x: np.ndarray, y: np.ndarray, condition: bool) -> list[np.ndarray]:
        """Results of the program; `x` and `y` are overwritten where it writes to its arguments."""
        values = [x, y]
        for kind, number, other in self.steps:
            value = values[number]
            if kind == "bump":
                value += 100
            elif kind == "plus":
                value += values[other]
            elif kind in ("constant", "zeros"):
                value = np.full(SHAPE, 7 if kind == "constant" else 0, "float32")
            elif kind == "branch":
                value = value if condition else values[other]
            elif kind not in ("name", "field", "view"):
                make = {"turned": np.transpose, "negative": np.negative, "add": lambda a, b=values[other]: a + b}
                value = make.get(kind, np.copy)(value).copy()
            values.append(value)
        return [values[number] for number in self.results]


def branch(condition: relax.Var, *values: relax.Var) -> relax.If:
    def sequence(value: relax.Var) -> relax.SeqExpr:
        named = relax.Var("named", value.ty)
        body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(named, value)])], named)
        relax.expr._update_type(body, value.ty)
        return body

    node = relax.If(condition, *map(sequence, values))
    relax.expr._update_type(node, values[0].ty)
    return node


def check_program(seed: int) -> None:
    program = Program(seed)
    machine = rh.vm.VirtualMachine(rh.compile(program.module))
    for condition in (True, False, True):
        arrays = [np.arange(1, 5, dtype="float32").reshape(SHAPE) * factor for factor in (1, 10)]
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        actual = machine["main"](*tensors, tvm.runtime.tensor(np.array(condition)))
        after = [array.copy() for array in arrays]
        expected = program.meaning(*after, condition)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            np.testing.assert_array_equal(one.numpy(), other, f"seed {seed}, result {number} of {program.steps}")
        for array, tensor, written in zip(arrays, tensors, after, strict=True):
            if np.array_equal(array, written):
                np.testing.assert_array_equal(tensor.numpy(), array, f"an argument, seed {seed}, {program.steps}")


@pytest.mark.parametrize("number", range(12))
def test_random_programs(number):
    check_program(int(fresh_rng().integers(2**31)) + number)


def test_a_constant_that_a_step_of_the_schedule_makes():
    """A command buffer takes it as a constant in `main`, and as an argument in a later step."""
    check_program(88189197)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300))
def test_more_random_programs(number):
    check_program(int(fresh_rng().integers(2**31)) + 100 + number)
