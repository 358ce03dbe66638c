"""Targets for this very machine."""

from __future__ import annotations

import os
import platform

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te
from tvm.target import codegen

import relax_hetero as rh
from relax_hetero.backends import cuda
from relax_hetero.errors import VDeviceError
from relax_hetero.target import native_target
from relax_hetero.target.cpu_cores import num_threads
from relax_hetero.target.vdevice import parse_vdevices


def test_llvm_describes_this_cpu():
    target = rh.native("llvm")
    assert target.kind.name == "llvm"
    assert target.attrs["mcpu"] == codegen.llvm_get_system_cpu()
    assert 1 <= target.attrs["num-cores"] == num_threads() <= (os.cpu_count() or 1)
    host = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    present, names = {str(name) for name, has in host.items() if has}, {str(name) for name in host}
    assert codegen.llvm_get_cpu_features(target) & names == present  # the rest are tuning flags of the CPU


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 registers in the assembly")
def test_llvm_uses_the_widest_vectors():
    target = rh.native("llvm")
    a = te.placeholder((64,), "float32", name="a")
    b = te.compute((64,), lambda i: a[i] * 2.0 + 1.0, name="b")
    sch = tvm.s_tir.Schedule(te.create_prim_func([a, b]))
    sch.vectorize(sch.get_loops(sch.get_sblock("b"))[0])
    library = tvm.tirx.build(sch.mod, target=target)
    features = codegen.llvm_get_cpu_features(target)
    register = "zmm" if "avx512f" in features else "ymm" if "avx" in features else "xmm"
    assert register in library.inspect_source("asm")
    x, y = np.arange(64, dtype="float32"), tvm.runtime.empty((64,), "float32")
    library["main"](tvm.runtime.tensor(x), y)  # no illegal instruction, and right
    np.testing.assert_allclose(y.numpy(), x * 2 + 1)


def test_other_kinds():
    assert rh.native("c").kind.name == "c"
    assert rh.native("cuda").arch.startswith("sm_")
    assert rh.native("cuda").arch != "sm_50"
    assert rh.native("metal").kind.name == "metal"


@pytest.mark.skipif(tvm.rocm(0).exist, reason="asks for an absent GPU")
def test_rocm_is_not_guessed(capfd):
    with pytest.raises(VDeviceError, match=r"vdevices\[0\]: 'rocm'.*mcpu"):
        parse_vdevices(["rocm"])
    assert "Warning" not in capfd.readouterr().err


def test_unknown_targets_are_refused_with_the_known_kinds():
    with pytest.raises(VDeviceError, match=r"vdevices\[1\]: 'gpu'.*kinds are c, cuda"):
        parse_vdevices(["llvm", "gpu"])


def test_an_assumed_architecture_is_logged_once(caplog, monkeypatch):
    absent = FakeGPU()
    absent.exist = False
    monkeypatch.setattr(tvm, "cuda", lambda index: absent)
    monkeypatch.setattr(cuda, "_native_config", cuda._native_config.__wrapped__)  # without its cache
    cuda._warn_of_default_arch.cache_clear()
    assert [entry.target.arch for entry in parse_vdevices(["cuda:0", "cuda:1"])] == ["sm_90a", "sm_90a"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "sm_90a" in caplog.text


@pytest.mark.parametrize("kind", ["foo", "", "cuda:1", "composite", None])
def test_unknown_kind(kind):
    with pytest.raises(VDeviceError, match="kinds are c, cuda"):
        rh.native(kind)


def test_a_gpu_that_is_not_described_is_that_of_a_list(capfd):
    """Also where there is none: TVM would assume one of 2014, and say so where the module is written."""
    plain, other = rh.VDevice("cuda"), rh.VDevice({"kind": "cuda", "arch": "sm_80"})
    assert native_target.with_hardware(plain).target.arch == parse_vdevices(["cuda:0"])[0].target.arch
    assert native_target.with_hardware(other) is other
    assert "Unable to detect" not in capfd.readouterr().err


class FakeGPU:
    """Properties that the driver would report for one GPU."""

    exist = True
    compute_version = "10.0"
    max_threads_per_block = 1024
    max_shared_memory_per_block = 49152
    warp_size = 32


def test_cuda_asks_the_driver(monkeypatch):
    """Each GPU of the machine is asked itself."""
    other = FakeGPU()
    other.compute_version = "8.0"
    monkeypatch.setattr(tvm, "cuda", lambda index: [FakeGPU(), other][index])
    monkeypatch.setattr(cuda, "_native_config", cuda._native_config.__wrapped__)  # without its cache
    assert rh.native("cuda").arch == "sm_100"
    assert rh.native("cuda", 1).arch == "sm_80"
    assert rh.native("cuda").attrs["thread_warp_size"] == 32
    assert [entry.target.arch for entry in parse_vdevices(["cuda", "cuda", "cuda:0"])] == ["sm_100", "sm_80", "sm_100"]


def test_hopper_gets_the_instructions_that_only_hopper_has(monkeypatch):
    hopper = FakeGPU()
    hopper.compute_version = "9.0"
    monkeypatch.setattr(tvm, "cuda", lambda index: hopper)
    monkeypatch.setattr(cuda, "_native_config", cuda._native_config.__wrapped__)  # without its cache
    assert rh.native("cuda").arch == "sm_90a"
    assert parse_vdevices([{"kind": "cuda"}])[0].target.arch == "sm_90a"


def test_a_gpu_beyond_those_of_this_machine_is_taken_for_the_first(caplog, monkeypatch):
    """The log says how many there are, instead of that there are none."""
    ampere, absent = FakeGPU(), FakeGPU()
    ampere.compute_version, absent.exist = "8.0", False
    monkeypatch.setattr(tvm, "cuda", lambda index: absent if index else ampere)
    monkeypatch.setattr(cuda.CudaBackend, "load", lambda self: True)
    monkeypatch.setattr(cuda, "_native_config", cuda._native_config.__wrapped__)  # without its cache
    assert [entry.target.arch for entry in parse_vdevices(["cuda", "cuda"])] == ["sm_80", "sm_80"]
    (record,) = {record.getMessage() for record in caplog.records}
    assert record.startswith("cuda:1: found 1 GPU in this machine, expected 2; ") and "sm_80" in record


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")
def test_cuda_describes_this_gpu():
    number = tvm.cuda(0).compute_version.replace(".", "")
    assert rh.native("cuda").arch == ("sm_90a" if number == "90" else f"sm_{number}")
    assert rh.native("cuda").attrs["max_threads_per_block"] == tvm.cuda(0).max_threads_per_block
