"""Code for a better CPU than this one is refused, not run into an illegal instruction."""

import json

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.vm.device import cpu_features


@pytest.fixture
def old_cpu(monkeypatch):
    monkeypatch.setattr(
        cpu_features, "linux_features", lambda: frozenset({"pni", "ssse3", "sse4_1", "sse4_2", "popcnt"})
    )


def spec(**target):
    return rh.vm.DeviceSpec(json.dumps({"kind": "llvm", **target}))


def test_this_cpu_runs_what_was_compiled_for_it():
    cpu_features.check_cpu("llvm:0", rh.vm.DeviceSpec(str(rh.native("llvm"))))


def test_missing_instructions_are_named(old_cpu):
    cpu_features.check_cpu("llvm:0", spec(mtriple="x86_64-linux-gnu", mcpu="x86-64-v2"))
    with pytest.raises(
        rh.BindingError, match="llvm:1 was compiled for a CPU with avx, avx2, .*fma.* which this one lacks"
    ):
        cpu_features.check_cpu("llvm:1", spec(mtriple="x86_64-linux-gnu", mcpu="x86-64-v3"))
    with pytest.raises(rh.BindingError, match="avx512f"):
        cpu_features.check_cpu("llvm:1", spec(mtriple="x86_64-linux-gnu", mattr=["+avx512f"]))


def test_vectors_of_sve_have_the_length_of_the_code(monkeypatch):
    a64fx = {"asimd", "asimdhp", "sve"}
    arm = spec(mtriple="aarch64-linux-gnu", mcpu="a64fx")
    monkeypatch.setattr(cpu_features, "linux_features", lambda: frozenset(a64fx | {"sve-512-bits"}))
    cpu_features.check_cpu("llvm:0", arm)
    monkeypatch.setattr(cpu_features, "linux_features", lambda: frozenset(a64fx | {"sve-256-bits"}))
    with pytest.raises(rh.BindingError, match="llvm:0 was compiled for a CPU with sve-512-bits, which this one lacks"):
        cpu_features.check_cpu("llvm:0", arm)


def test_the_file_remembers_them(chain, tmp_path, monkeypatch):
    chain.export_library(tmp_path / "model.so")
    exe = rh.load(tmp_path / "model.so")
    assert exe.devices[0].cpu_features is not None
    rh.vm.VirtualMachine(exe)["twice"](np.ones(4, "float32"))
    monkeypatch.setattr(cpu_features, "linux_features", lambda: frozenset({"fpu"}))
    expected = set(exe.devices[0].cpu_features) & cpu_features._LINUX_NAMES.keys()
    if expected:
        with pytest.raises(rh.BindingError, match="llvm:0 was compiled for a CPU with"):
            rh.vm.VirtualMachine(exe)


def test_other_devices_and_silent_systems_pass(old_cpu, monkeypatch):
    cpu_features.check_cpu("c:0", rh.vm.DeviceSpec('{"kind": "c"}'))
    cpu_features.check_cpu("cuda:0", rh.vm.DeviceSpec('{"kind": "cuda", "arch": "sm_90"}'))
    monkeypatch.setattr(cpu_features, "linux_features", frozenset)
    cpu_features.check_cpu("llvm:0", spec(mcpu="x86-64-v4"))
