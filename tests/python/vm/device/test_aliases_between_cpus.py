"""A transfer between two CPUs is the same memory where nobody writes: no copy, and nobody notices."""

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.vm.device import builtins
from seeds import fresh_rng

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}
W = np.arange(24, dtype="float32").reshape(4, 6)


@ir_module(V4, (V2, 1))
class Moves:
    @R.function
    def both(x: R.Tensor(("n", 6), "float32", "llvm:0")):
        with R.dataflow():
            a = R.exp(x)
            b = R.to_vdevice(a, "llvm:1")
            c = R.to_vdevice(R.reshape(a, (-1,)), "llvm:1")
            R.output(a, b, c)
        return (a, (b, c))

    @R.function
    def argument(x: R.Tensor(("n", 6), "float32", "llvm:0")):
        y = R.to_vdevice(x, "llvm:1")
        return y

    @R.function
    def constant(x: R.Tensor((4, 6), "float32", "llvm:1")):
        with R.dataflow():
            weight: R.Tensor((4, 6), "float32", "llvm:0") = R.const(W)
            moved = R.to_vdevice(weight, "llvm:1")
            y = R.add(moved, x)
            R.output(moved, y)
        return (moved, y)


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Moves))


@pytest.fixture
def copies(monkeypatch):
    """Bytes that transfers have copied."""
    moved, copy = [], builtins.copy_into

    def counted(source, *args, **options):
        moved.append(source.numpy().nbytes)
        copy(source, *args, **options)

    monkeypatch.setattr(builtins, "copy_into", counted)
    return moved


def random(*shape):
    return fresh_rng().random(shape, "float32")


def test_results_do_not_share_memory_with_each_other(vm, copies):
    x = random(5, 6)
    a, (b, c) = vm["both"](x)
    expected = np.exp(x)
    assert [str(t.device) for t in (a, b, c)] == ["cpu:0", "cpu:1", "cpu:1"] and not copies
    assert len({t.data_ptr() for t in (a, b, c)}) == 3
    a.copyfrom(np.zeros((5, 6), "float32"))
    b.copyfrom(np.ones((5, 6), "float32"))
    np.testing.assert_allclose(c.numpy(), expected.ravel(), rtol=1e-6)


def test_results_go_into_buffers(vm, copies):
    x = random(3, 6)
    buffers = np.empty((3, 6), "float32"), (np.empty((3, 6), "float32"), np.empty(18, "float32"))
    vm["both"](x, out=buffers)
    for buffer in (buffers[0], *buffers[1]):
        np.testing.assert_allclose(buffer.ravel(), np.exp(x).ravel(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_arguments_and_results_do_not_share_memory(vm, copies, kind):
    x = random(4, 6)
    argument = x.copy() if kind == "numpy" else tvm.runtime.tensor(x)
    for _ in range(2):  # known calls too
        y = vm["argument"](argument)
        y.copyfrom(np.zeros((4, 6), "float32"))
        np.testing.assert_array_equal(argument if kind == "numpy" else argument.numpy(), x)
    assert str(y.device) == "cpu:1" and not copies


def test_constants_stay_what_they_are(vm, copies):
    x = random(4, 6)
    for _ in range(2):
        moved, y = vm["constant"](tvm.runtime.tensor(x, tvm.cpu(1)))
        np.testing.assert_array_equal(moved.numpy(), W)
        np.testing.assert_allclose(y.numpy(), W + x, rtol=1e-6)
        moved.copyfrom(np.zeros((4, 6), "float32"))
    assert not copies


def test_who_writes_in_place_gets_a_copy(copies):
    @ir_module(V4, (V2, 1))
    class Writes:
        @T.prim_func(private=True, s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("a"):
                    v = T.axis.spatial(4, i)
                    a[v] = a[v] + T.float32(1)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            with R.dataflow():
                moved: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
                y = R.call_tir_inplace(
                    Writes.increment, (moved,), inplace_indices=0, out_ty=R.Tensor((4,), "float32", "llvm:1")
                )
                R.output(y)
            return y

    x = random(4)
    argument = tvm.runtime.tensor(x)
    y = rh.vm.VirtualMachine(rh.compile(Writes))["main"](argument)
    np.testing.assert_allclose(y.numpy(), x + 1, rtol=1e-6)
    np.testing.assert_array_equal(argument.numpy(), x)
    assert 16 in copies


def program(steps):
    """Each step makes a value of two earlier ones, on either device; the last four are returned."""
    bb = relax.BlockBuilder()
    devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType((3, 5), "float32", devices[0]))
    with bb.function("main", [x]):
        with bb.dataflow():
            values = [(x, 0)]
            for first, second, device in steps:
                operands = []
                for index in (first, second):
                    value, here = values[index % len(values)]
                    operands.append(value if here == device else bb.emit(relax.op.to_vdevice(value, devices[device])))
                values.append((bb.emit(relax.op.tanh(relax.op.subtract(*operands))), device))
                values.append((bb.emit(relax.op.to_vdevice(values[-1][0], devices[1 - device])), 1 - device))
            results = bb.emit_output(relax.Tuple([value for value, _ in values[-4:]]))
        bb.emit_func_output(results)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    return mod


@settings(max_examples=6)
@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 1)), min_size=2, max_size=8),
    one_device=st.booleans(),
)
def test_values_live_as_long_as_someone_sees_them(steps, one_device):
    vm = rh.vm.VirtualMachine(rh.compile(program(steps)), [tvm.cpu(0)] * 2 if one_device else None)
    for _ in range(2):
        x = random(3, 5)
        values = [x]
        for first, second, _ in steps:
            value = np.tanh(values[first % len(values)] - values[second % len(values)])
            values += [value, value]
        results = vm["main"](x)
        for result, expected in zip(results, values[-4:], strict=True):
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert len({result.data_ptr() for result in results}) == 4
