"""Code for a GPU that is not here is refused before anything runs, with what is here and what was expected."""

import ctypes
import json
from types import SimpleNamespace

import pytest

import relax_hetero as rh
from relax_hetero.backends.cuda import CudaBackend
from relax_hetero.vm.device import cuda_driver, devices


class Gpu:
    """Properties of a GPU as TVM reports them."""

    device_name = "NVIDIA A100"
    compute_version = "8.0"

    def __str__(self):
        return "cuda:0"


def spec(arch):
    return rh.vm.DeviceSpec(json.dumps({"kind": "cuda", "arch": arch}))


@pytest.mark.parametrize(
    "arch, version, runs",
    [
        ("sm_80", "8.0", True),
        ("sm_80", "8.9", True),
        ("sm_89", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_90", "9.0", True),
        ("sm_90a", "9.0", True),
        ("sm_90a", "8.0", False),
        ("sm_100a", "10.3", False),
        ("sm_100", "10.3", True),
        ("sm_120", "12.0", True),
        ("", "8.0", True),
    ],
)
def test_which_gpus_run_which_code(arch, version, runs):
    gpu = Gpu()
    gpu.compute_version = version
    if runs:
        cuda_driver.check_gpu("cuda:0", spec(arch), gpu)
    else:
        with pytest.raises(
            rh.BindingError,
            match=f"cuda:0 was compiled for {arch}.*found NVIDIA A100.*{version}.*for sm_{version.replace('.', '')}",
        ):
            cuda_driver.check_gpu("cuda:0", spec(arch), gpu)


class Driver:
    """The driver's library, of a version, with so many GPUs."""

    def __init__(self, version, count):
        self.version, self.count = version, count

    def cuDriverGetVersion(self, number):
        number._obj.value = self.version

    def cuInit(self, flags):
        return 0 if self.count else 100

    def cuDeviceGetCount(self, number):
        number._obj.value = self.count
        return 0


class Runtime:
    def cudaRuntimeGetVersion(self, number):
        number._obj.value = 13000


@pytest.mark.parametrize(
    "driver, failure, message",
    [
        (None, "", "no NVIDIA driver is installed"),
        (Driver(12040, 1), "", r"driver supports CUDA 12.4, expected 13.0 or newer"),
        (Driver(13000, 1), "libcudart.so.13: no such file", r"libcudart.so.13: no such file: pip install"),
        (Driver(13000, 0), "", "finds no GPU"),
        (Driver(13000, 1), "", "it has 1 GPU$"),
        (Driver(13050, 4), "", "it has 4 GPUs$"),
    ],
)
def test_reasons_for_a_missing_gpu(monkeypatch, driver, failure, message):
    def library(name):
        if name == "libtvm_runtime_cuda.so":
            return Runtime()
        if driver is None:
            raise OSError("no such file")
        return driver

    monkeypatch.setattr(cuda_driver, "ctypes", SimpleNamespace(CDLL=library, c_int=ctypes.c_int, byref=ctypes.byref))
    monkeypatch.setattr(CudaBackend, "why_not_loaded", lambda self: failure)
    absent = devices.runtime.device("cuda", 99)
    with pytest.raises(rh.BindingError, match=r"cuda:0 is to run on cuda:99, .*does not have: .*" + message):
        devices.check_device("cuda:0", spec("sm_90a"), absent)
