"""On a machine with NVIDIA GPUs: the RFC's examples, transfers in every direction, constants, wrong device lists."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import BindingError, PlacementError
from relax_hetero.transform import RealizeVDevice

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CUDA = {"kind": "cuda", "arch": "sm_90"}
CPU = rh.native("llvm")


def random(*shape):
    return np.random.default_rng(sum(shape)).random(shape, "float32")


def chain(devices, steps):
    """`steps` exp/tanh pairs, one on each of `devices` (by index) in turn, over a symbolic first dimension."""
    bb = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 37), "float32", devices[steps[0]]))
    with bb.function("main", [x]):
        with bb.dataflow():
            value = x
            for index, device in enumerate(steps):
                if index:
                    value = bb.emit(relax.op.to_vdevice(value, devices[device]))
                value = bb.emit(relax.op.tanh(bb.emit(relax.op.exp(value))))
            out = bb.emit_output(value)
        bb.emit_func_output(out)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    return mod


def check_chain(devices, steps, machine=None):
    vm = rh.vm.VirtualMachine(rh.compile(chain(devices, steps)), machine)
    for rows in (1, 5, 1000):
        x = random(rows, 37)
        expected = x
        for _ in steps:
            expected = np.tanh(np.exp(expected))
        np.testing.assert_allclose(vm["main"](x).numpy(), expected, rtol=1e-5)
    return vm


def test_rfc_hint_and_transfer():
    @ir_module("llvm", CUDA)
    class Mod:
        @R.function
        def foo(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                x1 = R.hint_on_device(x, tvm.cpu())
                y1 = R.hint_on_device(y, tvm.cuda())
                s1 = R.add(x1, x1)
                s2 = R.to_vdevice(s1, "cuda:0")
                s = R.add(y1, s2)
                R.output(s)
            return s

    vm = rh.vm.VirtualMachine(rh.compile(Mod))
    x, y = random(2, 3), random(3, 2).T.copy()
    out = vm["foo"](x, y)
    assert out.device == tvm.cuda(0)
    np.testing.assert_allclose(out.numpy(), x + x + y, rtol=1e-6)


def test_rfc_conflict():
    @ir_module("llvm", CUDA)
    class Mod:
        @R.function
        def foo(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            a = R.hint_on_device(x, tvm.cpu())
            b = R.hint_on_device(y, tvm.cuda())
            c = R.add(a, b)
            return c

    with pytest.raises(PlacementError, match="relax.add"):
        RealizeVDevice()(Mod)


@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (0, 1, 0, 1), (1,)])
def test_cpu_and_gpu(steps):
    check_chain([rh.VDevice(CPU), rh.VDevice(CUDA)], steps)


@two_gpus
@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (2, 0, 1, 2), (0, 1, 0, 1)])
def test_two_gpus(steps):
    check_chain([rh.VDevice(CUDA, 0), rh.VDevice(CUDA, 1), rh.VDevice(CPU)], steps)


@two_gpus
def test_remapping_to_another_gpu():
    check_chain([rh.VDevice(CPU), rh.VDevice(CUDA)], (0, 1), {"cuda:0": tvm.cuda(1)})


def test_constants_on_the_gpu():
    devices = [rh.VDevice(CPU), rh.VDevice(CUDA)]
    w = random(64, 64)
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 64), "float32", devices[0]))
    with bb.function("main", [x]):
        with bb.dataflow():
            constant = relax.const(w)
            a = bb.emit(relax.op.matmul(x, constant))
            b = bb.emit(relax.op.to_vdevice(a, devices[1]))
            c = bb.emit_output(relax.op.nn.relu(bb.emit(relax.op.matmul(b, constant))))
        bb.emit_func_output(c)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    exe = rh.compile(mod)
    assert sorted(c.device for c in exe.metadata.constants) == [0, 1]
    vm = rh.vm.VirtualMachine(exe)
    x = random(8, 64)
    for _ in range(3):
        np.testing.assert_allclose(vm["main"](x).numpy(), np.maximum(x @ w @ w, 0), rtol=1e-4)
    report = vm.profile("main", x)
    assert {row.device for row in report.rows} >= {"llvm:0", "cuda:0"}


def test_cuda_without_a_cpu_vdevice():
    """The host is implicit; the shape is read there."""
    check_chain([rh.VDevice(CUDA)], (0,))


def test_matmul_softmax_layer_norm_on_the_gpu():
    bb = relax.BlockBuilder()
    device = rh.VDevice(CUDA)
    x = relax.Var("x", relax.TensorType((33, 65), "float32", device))
    w = random(65, 17)
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.matmul(x, relax.const(w)))))
            gamma, beta = relax.const(np.ones(17, "float32")), relax.const(np.zeros(17, "float32"))
            z = bb.emit_output(relax.op.nn.layer_norm(y, gamma, beta, axes=[-1]))
        bb.emit_func_output(z)
    mod = bb.get()
    mod.update_global_info("vdevice", [device])
    x = random(33, 65)
    out = rh.vm.VirtualMachine(rh.compile(mod))["main"](x).numpy()
    logits = x.astype("float64") @ w
    e = np.exp(logits - logits.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    expected = (p - p.mean(-1, keepdims=True)) / np.sqrt(p.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)


def test_wrong_device_lists():
    exe = rh.compile(chain([rh.VDevice(CPU), rh.VDevice(CUDA)], (0, 1)))
    for wrong in ([tvm.cpu(0)], [tvm.cuda(0), tvm.cpu(0)], [tvm.cpu(0), tvm.cpu(1)], [tvm.cpu(0), tvm.cuda(99)]):
        with pytest.raises(BindingError):
            rh.vm.VirtualMachine(exe, wrong)
    vm = rh.vm.VirtualMachine(exe, [tvm.cpu(0), tvm.cuda(0)])
    np.testing.assert_allclose(vm["main"](random(2, 37)).numpy().shape, (2, 37))


def test_gpu_arguments_and_results_by_dlpack():
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(rh.compile(chain([rh.VDevice(CPU), rh.VDevice(CUDA)], (1,))))
    x = torch.rand(3, 37, device="cuda")
    out = torch.from_dlpack(vm["main"](x))
    assert out.is_cuda
    torch.testing.assert_close(out, torch.tanh(torch.exp(x)), rtol=1e-5, atol=1e-6)


def test_export_and_load(tmp_path):
    exe = rh.compile(chain([rh.VDevice(CPU), rh.VDevice(CUDA)], (0, 1)))
    path = tmp_path / "model.so"
    exe.export_library(path)
    vm = rh.vm.VirtualMachine(rh.load(path))
    x = random(4, 37)
    expected = np.tanh(np.exp(np.tanh(np.exp(x))))
    np.testing.assert_allclose(vm["main"](x).numpy(), expected, rtol=1e-5)


# Indices and divisors that only a call knows, alone and fused.
@ir_module({"kind": "cuda", "arch": "sm_90"}, "llvm")
def Values(
    x: R.Tensor(("n", 4), "float32", "cuda:0"),
    i: R.Tensor(("m",), "int64", "cuda:0"),
    d: R.Tensor(("m",), "int32", "cuda:0"),
):
    with R.dataflow():
        a = R.exp(R.take(x, i, axis=0))
        b = R.floor_divide(R.add(d, d), d)
        R.output(a, b)
    return a, b


EXTREMES = [10, -11, 2**31, 2**40, -(2**31) - 1, 2**63 - 1, -(2**63)]


def values_machine(checks):
    return rh.vm.VirtualMachine(rh.compile(Values, cache=False, checks=checks))


def test_kernels_hold_indices_and_divisors():
    vm = values_machine("default")
    x = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")
    i = np.array([0, -1, 9, -10, *EXTREMES], "int64")
    d = np.array([1, 0, -1, -(2**31), 3, 0, 7, -2, 0, 5, 2**30], "int32")
    gathered, quotient = (result.numpy() for result in vm["main"](x, i, d))
    front = [index + 10 if index < 0 else index for index in i.tolist()]
    np.testing.assert_allclose(gathered, np.exp(x[np.clip(front, 0, 9)]), rtol=1e-5)
    wrapped = ((d.astype("int64") * 2 + 2**31) % 2**32 - 2**31).tolist()
    want = [
        0 if by == 0 else -value if by == -1 else value // by for value, by in zip(wrapped, d.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(quotient, want)
    empty, _ = vm["main"](x[:0], i, d)
    np.testing.assert_array_equal(empty.numpy(), np.ones((len(i), 4), "float32"))
