"""Attempts to break command buffers: numbers, names, kernels and memory that nobody should pass."""

import copy
import gc
import pickle

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from vm.command_kernels import Kernels


def added(amount, negated=False):
    """A module with a kernel that adds to four numbers, and a function that calls it twice, on an input or minus it."""
    builder = relax.BlockBuilder()
    a = te.placeholder((4,), "float32", "a")
    kernel = te.create_prim_func([a, te.compute((4,), lambda i: a[i] + amount)]).with_attr("op_pattern", 8)
    step = builder.add_func(kernel, "step")
    ty = relax.TensorType((4,), "float32")
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.op.negative(x)) if negated else x
            y = builder.emit(relax.call_tir(step, [first], ty))
            z = builder.emit_output(relax.call_tir(step, [y], ty))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture(scope="module")
def machine():
    return rh.vm.VirtualMachine(rh.compile(added(1.0)))


def recording(machine, **options):
    buffer = rh.vm.CommandBuffer(machine, **{"slots": 2, "parameters": 1, **options})
    buffer.begin()
    return buffer


def test_kernels_of_another_executable(machine):
    """They have the name of one of its own, and would leave memory if the kernel objects did not keep them there."""
    other = rh.vm.VirtualMachine(rh.compile(added(10.0)))
    kernel, own = other.kernel("step"), machine.kernel("step")
    buffer = recording(machine)
    with pytest.raises(rh.BindingError, match="kernel 'step' is another executable's"):
        buffer.dispatch(kernel, 1, [buffer.slot(0), buffer.slot(1)])
    sibling = recording(rh.vm.VirtualMachine(machine.executable))
    sibling.dispatch(own, 1, [sibling.slot(0), sibling.slot(1)])
    sibling.end(compiled=False)
    result = np.zeros(4, "float32")
    sibling.submit([np.ones(4, "float32"), result], [0])
    assert (result == 2).all()
    del other
    gc.collect()
    x = np.ones(4, "float32")
    assert kernel.function(x.ctypes.data, result.ctypes.data) == 0 and (result == 11).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_that_commands_cannot_count_in(machine, compiled):
    buffer = recording(machine)
    number = buffer.parameter(0)
    for far in (lambda: buffer.slot(0, 2**63), lambda: number * 2**64, lambda: buffer.slot(0, 0, -(2**64))):
        with pytest.raises(rh.BindingError, match="expected a number of type int64"):
            far()
    with pytest.raises(rh.BindingError, match="the workgroup count along x is 0x1000000000000000000"):
        buffer.dispatch("step", 2**72, [buffer.slot(0), buffer.slot(1)])
    with pytest.raises(rh.BindingError, match="arithmetic of parameters takes 1001 characters, expected at most 1000"):
        for _ in range(250):
            number = number + 1
    buffer.fill(buffer.slot(0, 0, number), b"a")  # as deep as it goes
    buffer.end(compiled)
    memory = np.zeros(1000, "int8")
    buffer.submit([memory], [3])
    assert 0 < (memory == ord("a")).sum() == 3 + (number.text.count("+"))
    with pytest.raises(rh.BindingError, match="parameter 0 is 0x8000000000000000, expected a number of type int64"):
        buffer.submit([memory], [2**63])


@pytest.mark.parametrize("compiled", [True, False])
def test_arithmetic_that_leaves_int64_on_the_way(machine, compiled):
    """Python does not mind, machine code does."""
    buffer = recording(machine)
    number = buffer.parameter(0)
    buffer.fill(buffer.slot(0, number * number // 2**58, 1), b"a")
    buffer.dispatch("step", number * number, [buffer.slot(1, 0, 16), buffer.slot(1, 16, 16)])
    buffer.end(compiled)
    memory, added_to = np.zeros(512, "int8"), np.zeros(8, "float32")
    for far in (2**32, -(2**32), 3037000500):
        with pytest.raises(rh.BindingError, match="is [0-9]*, .parameter_0 . parameter_0., expected at most"):
            buffer.submit([memory, added_to], [far])
    assert not memory.any() and not added_to.any()
    buffer.submit([memory, added_to], [2**31])
    assert np.flatnonzero(memory).tolist() == [16] and (added_to[4:] == 1).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_floats_beyond_their_type(compiled):
    machine = rh.vm.VirtualMachine(rh.compile(Kernels))
    buffer = recording(machine)
    places = [buffer.slot(0), buffer.slot(1)]
    for far in (1e39, -(10**400)):
        with pytest.raises(rh.BindingError, match="scalar 'factor' of kernel 'scale' exceeds the range of float32"):
            buffer.dispatch("scale", 1, places, {"n": 4, "factor": far})
    buffer.dispatch("scale", 1, places, {"n": 4, "factor": float("-inf")})
    buffer.dispatch("scale", 1, places[::-1], {"n": 4, "factor": buffer.parameter(0)})
    buffer.end(compiled)
    x, y = np.ones(4, "float32"), np.zeros(4, "float32")
    with pytest.raises(rh.BindingError, match="parameter 0 exceeds the range of float64"):
        buffer.submit([x, y], [10**400])
    assert (x == 1).all() and (y == 0).all()
    buffer.submit([x, y], [-2.5])
    assert (x == np.inf).all() and (y == -np.inf).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_of_one_memory_that_parameters_move_into_each_other(machine, compiled, is_kept):
    memory = np.zeros(24, "float32")
    buffer = recording(machine, parameters=2)
    first, second = (buffer.parameter(i) * 4 for i in range(2))
    here = (lambda *place: buffer.buffer(memory, *place)) if is_kept else (lambda *place: buffer.slot(0, *place))
    buffer.dispatch("step", 1, [here(first), here(second)])
    buffer.copy(here(64, 16), here(second + 16))
    buffer.end(compiled)
    bindings = [] if is_kept else [memory]
    for row in ((0, 0), (0, 3), (3, 0), (0, 9), (0, 12)):
        with pytest.raises(rh.BindingError, match=r"the gap between .* of which one is written, is -\d+, "):
            buffer.submit(bindings, row)
    assert (memory == 0).all()
    for row in ((0, 4), (4, 0), (12, 8), (20, 8)):
        memory[:] = np.arange(24)
        buffer.submit(bindings, row)
        expected = np.arange(24, dtype="float32")
        expected[row[1] : row[1] + 4] = expected[row[0] : row[0] + 4] + 1
        expected[row[1] + 4 : row[1] + 8] = expected[16:20]
        np.testing.assert_array_equal(memory, expected)


def test_odd_bindings_and_operands(machine):
    buffer = recording(machine)
    for operands in (5, None):
        with pytest.raises(rh.BindingError, match="kernel 'step' is given a .*, expected a sequence of operands"):
            buffer.dispatch("step", 1, operands)
    buffer.dispatch("step", 1, [buffer.slot(0), buffer.slot(1)])
    buffer.end()
    memory = np.zeros(12, "float32")
    for part in ((memory, 0.0, 16), (memory, True), (memory, 0, "16")):
        with pytest.raises(
            rh.BindingError, match="slot 0 has the offset or length .*, expected .buffer, offset, length."
        ):
            buffer.bind([part, memory])
    for part in ((memory, -16, 16), (memory, 16, -16), (memory, 2**70, 16), (memory, 40, 16)):
        with pytest.raises(rh.BindingError, match="slot 0 takes .* bytes, expected a range within them"):
            buffer.bind([part, memory])
    table = buffer.bind([(memory, np.int64(16), np.uint8(16)), (memory, None, 16)])
    buffer.submit(table, [0])
    np.testing.assert_array_equal(memory[:5], [1, 1, 1, 1, 0])
    for take in (pickle.dumps, copy.deepcopy):
        with pytest.raises(rh.BindingError, match="cannot be pickled or copied"):
            take(table)


def test_a_pass_that_comes_too_early_leaves_the_module_to_those_before_it():
    early = rh.transform.RealizeVDevice()(added(1.0, negated=True))
    formed = rh.transform.FormCommandBuffers()(early)
    assert_structural_equal(formed, early)
    exe = rh.compile(formed)
    assert len(exe.metadata.regions) == 1
    x = np.arange(4, dtype="float32")
    np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](x).numpy(), 2 - x)


@tvm.register_global_func("relax_hetero.test.half", override=True)
def half(x):
    return tvm.runtime.tensor(x.numpy() / 2, x.device)


@ir_module({"kind": "llvm", "mcpu": "x86-64-v3"}, "llvm:1")
class Everything:
    """Ends of runs: recursion, a branch, work in place, an unknown function, a transfer, another function."""

    @T.prim_func(s_tir=True)
    def next(a: T.handle, b: T.handle):
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            B[i] = A[i] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def add_to(c: T.handle, a: T.handle):
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        C = T.match_buffer(c, (n,), "float32")
        A = T.match_buffer(a, (n,), "float32")
        for i in range(n):
            C[i] = C[i] + A[i]

    @T.prim_func(private=True, s_tir=True)
    def times(a: T.handle, factor: T.int64, b: T.handle):
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            B[i] = A[i] * T.Cast("float32", factor)

    @R.function(private=True)
    def again(x: R.Tensor(("n",), "float32", "llvm:0"), left: R.Tensor((), "int32", "llvm:0")) -> R.Tensor(
        ("n",), "float32", "llvm:0"
    ):
        n = T.int64()
        cls = Everything
        a = R.call_tir(cls.next, (x,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        b = R.call_tir(cls.next, (a,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        fewer = R.subtract(left, R.const(1, "int32"))
        more = R.greater(fewer, R.const(0, "int32"))
        if more:
            c: R.Tensor((n,), "float32", "llvm:0") = cls.again(b, fewer)
            d = R.call_tir(cls.next, (c,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
            result = R.call_tir(cls.next, (d,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        else:
            result = b
        return result

    @R.function
    def main(x: R.Tensor(("n",), "float32", "llvm:0"), left: R.Tensor((), "int32", "llvm:0"), factor: R.Prim("int64")):
        n = T.int64()
        cls = Everything
        a = R.call_tir(cls.next, (x,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        b = R.call_tir(cls.times, (a, factor), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        c = R.call_pure_packed("relax_hetero.test.half", b, ty_args=R.Tensor((n,), "float32", "llvm:0"))
        d = cls.again(c, left)
        e = R.call_tir(cls.next, (d,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        before = R.call_tir(cls.next, (e,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        sum_ = R.call_tir_inplace(cls.add_to, (e, a), out_ty=R.Tensor((n,), "float32", "llvm:0"), inplace_indices=[0])
        after = R.call_tir(cls.next, (sum_,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        there = R.to_vdevice(after, "llvm:1")
        f = R.call_tir(cls.next, (there,), out_ty=R.Tensor((n,), "float32", "llvm:1"))
        g = R.call_tir(cls.next, (f,), out_ty=R.Tensor((n,), "float32", "llvm:1"))
        return (before, sum_, after, g)


def expected_of_everything(x, left, factor):
    a = x + 1
    e = a * factor / 2 + (4 * left - 2) + 1
    return e + 1, e + a, e + a + 1, e + a + 3


def test_modules_at_every_stage():
    stages, mod = [Everything], Everything
    for step in rh.get_pipeline().passes:
        mod = step(mod)
        if step.info.name in ("RealizeVDevice", "FormDispatches", "FormCommandBuffers", "LowerToVM"):
            stages.append(mod)
    stages += [rh.transform.FormCommandBuffers()(stage) for stage in stages[:3]]
    for stage in stages:
        exe = rh.compile(stage)
        assert [(r.function, r.device) for r in exe.metadata.regions] == [
            *[("again", 0)] * 3,  # what the condition needs goes to the host, and is a run of its own
            *[("main", 0)] * 2,
            ("main", 1),
        ]
        machine = rh.vm.VirtualMachine(exe)
        for n, left, factor in ((4, 1, 3), (0, 3, 1), (100, 5, -2), (1, 2, 0)):
            x = np.arange(n, dtype="float32")
            actual = machine["main"](x, np.int32(left), factor)
            for field, expected in zip(actual, expected_of_everything(x, left, factor), strict=True):
                np.testing.assert_array_equal(field.numpy(), expected)
