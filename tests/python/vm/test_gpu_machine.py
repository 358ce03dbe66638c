"""The machine on CUDA devices: transfers in every direction, weights, foreign tensors, no compiler."""

import copy
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.vm.device.builtins import running_on, to_device
from relax_hetero.vm.device.tensors import copy_to, from_numpy, is_host

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CUDA = {"kind": "cuda", "arch": "sm_90"}
X, W = np.random.default_rng(0).random((5, 64), "float32"), np.arange(64, dtype="float32")


# exp on the GPU, addition of a weight on the CPU, both returned.
@ir_module(CUDA, "llvm")
def Mixed(x: R.Tensor(("n", 64), "float32", "cuda:0"), w: R.Tensor((64,), "float32", "llvm:0")):
    n = T.int64()
    with R.dataflow():
        y: R.Tensor((n, 64), "float32", "cuda:0") = R.exp(x)
        moved: R.Tensor((n, 64), "float32", "llvm:0") = R.to_vdevice(y, "llvm:0")
        z: R.Tensor((n, 64), "float32", "llvm:0") = R.add(moved, w)
        R.output(y, z)
    return (z, y)


# A weight on the GPU and the same one on the CPU.
@ir_module(CUDA, "llvm")
def Weighted(x: R.Tensor((64,), "float32", "cuda:0"), w: R.Tensor((64,), "float32")):
    with R.dataflow():
        y: R.Tensor((64,), "float32", "cuda:0") = R.add(x, R.to_vdevice(w, "cuda:0"))
        z: R.Tensor((64,), "float32", "llvm:0") = R.add(R.to_vdevice(y, "llvm:0"), R.to_vdevice(w, "llvm:0"))
        R.output(y, z)
    return (y, z)


@pytest.fixture(scope="module")
def mixed():
    return rh.compile(Mixed)


def check(outputs, x=X):
    z, y = outputs
    assert [str(z.device), str(y.device)] == ["cpu:0", "cuda:0"]
    np.testing.assert_allclose(y.numpy(), np.exp(x), rtol=1e-5)
    np.testing.assert_allclose(z.numpy(), np.exp(x) + W, rtol=1e-5)


def test_numpy_and_tensors_of_either_device(mixed):
    vm = rh.vm.VirtualMachine(mixed)
    for move in (lambda a: a, tvm.runtime.tensor, lambda a: tvm.runtime.tensor(a, tvm.cuda(0))):
        check(vm["main"](move(X), move(W)))


def test_torch_tensors_after_work_that_is_still_queued(mixed):
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(mixed)
    a = torch.rand(4000, 4000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            a = (a @ a) / a.sum()
        x = a[:5, :64].contiguous().nan_to_num() * 0 + torch.from_numpy(X).cuda()
        outputs = vm["main"](x, torch.from_numpy(W))
    check(outputs)


def test_out_buffers_of_the_other_device(mixed):
    z, y = tvm.runtime.empty((5, 64), "float32", tvm.cuda(0)), np.empty((5, 64), "float32")
    rh.vm.VirtualMachine(mixed)["main"](X, W, out=(z, y))
    np.testing.assert_allclose(z.numpy(), np.exp(X) + W, rtol=1e-5)
    np.testing.assert_allclose(y, np.exp(X), rtol=1e-5)


def test_weights_are_uploaded_once_for_all_machines(tmp_path):
    rh.compile(Weighted, {"w": W}).export_library(tmp_path / "model.so")
    exe = rh.load(tmp_path / "model.so")
    machines = [rh.vm.VirtualMachine(exe) for _ in range(2)]
    for vm in machines:
        y, z = vm["main"](W)
        np.testing.assert_array_equal(y.numpy(), W * 2)
        np.testing.assert_array_equal(z.numpy(), W * 3)
    first, second = ([t.data_ptr() for t in vm._constants.values] for vm in machines)
    assert first == second
    assert {str(t.device) for t in machines[0]._constants.values} == {"cuda:0", "cpu:0"}


def test_profile_names_both_devices(mixed):
    rows = rh.vm.VirtualMachine(mixed).profile("main", X, W).rows
    assert {"cuda:0", "llvm:0"} <= {row.device for row in rows}


def test_devices_of_the_wrong_kind_or_absent(mixed):
    for devices, message in [
        ([tvm.cpu(0), tvm.cpu(0)], "cuda:0 was compiled for a cuda device"),
        ([tvm.cuda(0), tvm.cuda(0)], "llvm:0 was compiled for a cpu device"),
        ([tvm.cuda(99), tvm.cpu(0)], "cuda:0 is to run on cuda:99, which this machine does not have"),
        ([tvm.cuda(0)], "1 devices given, expected 2"),
    ]:
        with pytest.raises(rh.BindingError, match=message):
            rh.vm.VirtualMachine(mixed, devices)
    check(rh.vm.VirtualMachine(mixed)["main"](X, W))


@pytest.mark.parametrize("source", [tvm.cpu(0), tvm.cpu(3), tvm.cuda(0), pytest.param(tvm.cuda(1), marks=two_gpus)])
@pytest.mark.parametrize("target", [tvm.cpu(0), tvm.cpu(3), tvm.cuda(0), pytest.param(tvm.cuda(1), marks=two_gpus)])
def test_transfers_in_every_direction(source, target):
    x = from_numpy(X, source)
    with running_on((target, tvm.cpu(0)), ("global", "global")):
        moved = to_device(x, 0)
        again = to_device(x, 0, 1)
    assert str(moved.device) == str(target)
    # CPU devices share their memory.
    assert (moved.data_ptr() == x.data_ptr()) == (source == target or is_host(source) and is_host(target))
    assert again.data_ptr() != x.data_ptr()
    np.testing.assert_array_equal(moved.numpy(), X)
    np.testing.assert_array_equal(again.numpy(), X)


@two_gpus
@pytest.mark.timing
def test_gpus_copy_to_each_other_directly(mixed):
    for gpu in (0, 1):
        check_on = rh.vm.VirtualMachine(mixed, {"cuda:0": tvm.cuda(gpu)})
        assert str(check_on["main"](X, W)[1].device) == f"cuda:{gpu}"
    x = from_numpy(np.zeros(1 << 28, "uint8"), tvm.cuda(0))
    before = rate(x, tvm.cuda(1))
    from relax_hetero.vm.device.cuda_copies import enable_peer_access

    enable_peer_access([tvm.cuda(0), tvm.cuda(1)])
    after = rate(x, tvm.cuda(1))
    print(f"cuda:0 -> cuda:1: {before:.0f} GB/s, with peer access {after:.0f} GB/s")
    assert after > before * 2 or after > 100


def rate(x, target):
    copy_to(x, target)
    best = 0.0
    for _ in range(5):
        result = tvm.runtime.empty(x.shape, "uint8", target)
        start = time.perf_counter()
        x.copyto(result)
        x.device.sync()
        best = max(best, x.numel() / (time.perf_counter() - start) / 1e9)
    return best


def test_without_the_compiler(mixed, tmp_path):
    mixed.export_library(tmp_path / "model.so")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, numpy as np, relax_hetero as rh\n"
        "vm = rh.vm.VirtualMachine(rh.load(sys.argv[1]))\n"
        "z, y = vm['main'](np.zeros((2, 64), 'float32'), np.ones(64, 'float32'))\n"
        "assert str(y.device) == 'cuda:0' and (z.numpy() == 2).all()\n"
        "assert not any('libtvm_compiler' in line for line in open('/proc/self/maps'))\n"
    )
    env = {**os.environ, "TVM_USE_RUNTIME_LIB": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "model.so"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_results_of_gpus_are_copied():
    array = np.linspace(0, 1, 12, dtype="float32").reshape(3, 4)
    tensor = tvm.runtime.tensor(array, tvm.cuda(0))
    np.testing.assert_array_equal(tensor, array)
    assert np.argmax(tensor) == 11 and len(tensor) == 3 and float(tensor[0, 1]) == array[0, 1]
    np.testing.assert_array_equal(tensor + tensor, 2 * array)
    np.testing.assert_array_equal(np.from_dlpack(tensor, device="cpu"), array)
    copied = copy.deepcopy(tensor)
    assert copied.device == tensor.device and copied.data_ptr() != tensor.data_ptr()
    assert pickle.loads(pickle.dumps(tensor)).device == tvm.cpu(0)
    for refused in (lambda: np.array(tensor, copy=False), lambda: tensor.__setitem__(0, 1)):
        with pytest.raises(ValueError, match="cuda:0"):
            refused()
