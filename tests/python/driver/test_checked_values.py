"""Indices and divisors that only a call knows: refused by name on CPUs, in every form that work can take."""

import json

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.checks import CheckSpec
from relax_hetero.artifact.commands import GRAPH
from relax_hetero.artifact.metadata import Metadata
from relax_hetero.target.vdevice import vdevices_of

X = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")


def indices(*values):
    return np.array(values, "int64")


@ir_module()
def Fused(x: R.Tensor(("n", 4), "float32"), i: R.Tensor(("m",), "int64"), d: R.Tensor((), "int64")):
    with R.dataflow():
        taken = R.take(R.exp(x), R.floor_divide(i, d), axis=0)
        out = R.nn.softmax(R.add(taken, taken))
        R.output(out)
    return out


def expected(x, i):
    e = np.exp(2 * np.exp(x)[i])
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def fused():
    return rh.vm.VirtualMachine(rh.compile(Fused, cache=False))


@pytest.mark.parametrize("index", [10, -11, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_an_index_out_of_range(fused, index):
    message = f"function 'main': op relax.take of variable 'taken' in function 'main': index {index} is out of range"
    with pytest.raises(rh.HeteroError, match=rf"^{message}, expected -10 to 9$"):
        fused["main"](X, indices(0, index), np.array(1))


def test_indices_in_range_count_from_both_ends(fused):
    i = indices(0, 9, -1, -10)
    np.testing.assert_allclose(fused["main"](X, i, np.array(1)).numpy(), expected(X, i), rtol=1e-5)


def test_an_axis_without_elements(fused):
    assert fused["main"](X[:0], indices(), np.array(1)).shape == (0, 4)
    with pytest.raises(rh.HeteroError, match="index 0 is out of range, expected none, as the axis is empty"):
        fused["main"](X[:0], indices(0), np.array(1))


def test_a_divisor_of_0(fused):
    with pytest.raises(rh.HeteroError, match="relax.floor_divide of variable .*: an integer is divided by 0"):
        fused["main"](X, indices(0), np.array(0))


def test_submitted_calls(fused):
    bad, good = fused.submit("main", X, indices(99), np.array(1)), fused.submit("main", X, indices(1), np.array(1))
    with pytest.raises(rh.HeteroError, match="index 99 is out of range"):
        bad.result(60)
    np.testing.assert_allclose(good.result(60).numpy(), expected(X, [1]), rtol=1e-5)


def test_many_indices_are_checked_by_all_cores(fused):
    i = np.random.default_rng(0).integers(-10, 10, 100_000)
    np.testing.assert_allclose(fused["main"](X, i, np.array(1)).numpy(), expected(X, i), rtol=1e-5)
    i[77_777] = 12
    i[88_888] = 13
    with pytest.raises(rh.HeteroError, match="index 12 is out of range"):
        fused["main"](X, i, np.array(1))


@I.ir_module
class Branches:
    @R.function(private=True)
    def rows(x: R.Tensor((10, 4), "float32"), i: R.Tensor((3,), "int64")) -> R.Tensor((3, 4), "float32"):
        with R.dataflow():
            t = R.take(x, i, axis=0)
            u = R.nn.softmax(t)
            R.output(u)
        return u

    @R.function
    def main(x: R.Tensor((10, 4), "float32"), i: R.Tensor((3,), "int64"), c: R.Tensor((), "bool")) -> R.Tensor(
        (3, 4), "float32"
    ):
        cls = Branches
        if c:
            r = cls.rows(x, i)
        else:
            d = R.gather_elements(x, R.broadcast_to(R.reshape(i, (3, 1)), (3, 4)), axis=0)
            r = R.add(d, d)
        return r


def test_private_functions_and_branches():
    vm = rh.vm.VirtualMachine(rh.compile(Branches, cache=False))
    assert vm["main"](X, indices(0, 1, -1), np.array(False)).shape == (3, 4)
    with pytest.raises(rh.HeteroError, match="relax.take of variable 't' in function 'rows': index 10"):
        vm["main"](X, indices(0, 10, 1), np.array(True))
    with pytest.raises(rh.HeteroError, match="relax.gather_elements of variable 'd' in function 'main': index -11"):
        vm["main"](X, indices(0, -11, 1), np.array(False))


@ir_module("llvm", {"kind": "llvm", "num-cores": 1})
def TwoDevices(x: R.Tensor((10, 4), "float32", "llvm:0"), i: R.Tensor((3,), "int64", "llvm:0")):
    with R.dataflow():
        a = R.to_vdevice(R.exp(x), "llvm:1")
        t = R.take(a, R.to_vdevice(i, "llvm:1"), axis=0)
        w = R.to_vdevice(R.nn.softmax(t), "llvm:0")
        out = R.add(w, w)
        R.output(out)
    return out


def test_steps_of_two_devices():
    vm = rh.vm.VirtualMachine(rh.compile(TwoDevices, cache=False))
    for call in (vm["main"], lambda *args: vm.submit("main", *args).result(60)):
        assert call(X, indices(0, 1, 2)).shape == (3, 4)
        with pytest.raises(rh.HeteroError, match="relax.take of variable 't' .*: index 10 is out of range"):
            call(X, indices(0, 10, 2))


def test_checks_outlast_a_file(tmp_path):
    rh.compile(Fused, cache=False).export_library(str(tmp_path / "fused.so"))
    vm = rh.vm.VirtualMachine(rh.load(str(tmp_path / "fused.so")))
    with pytest.raises(rh.HeteroError, match="relax.take of variable 'taken' in function 'main': index 10"):
        vm["main"](X, indices(10), np.array(1))


def test_checks_are_data():
    checks = (CheckSpec("index", "op relax.take of variable 'y'"), CheckSpec("divisor", "op relax.mod"))
    metadata = Metadata((), -1, {}, checks=checks)
    assert Metadata.from_json(metadata.to_json()).checks == checks
    assert json.loads(metadata.to_json())["checks"][0]["subject"] == "index"


def test_an_unknown_kind_of_checks():
    with pytest.raises(rh.HeteroError, match="checks is 'all', expected one of 'default', 'strict'"):
        rh.compile(Fused, checks="all")


def test_strict_checks_change_nothing_on_a_cpu():
    assert len(vdevices_of(TwoDevices)) == 2
    strict, default = (rh.compile(TwoDevices, cache=False, checks=checks) for checks in ("strict", "default"))
    assert strict.metadata.checks == default.metadata.checks


@ir_module({"kind": "cuda", "arch": "sm_90"})
def OnGpu(x: R.Tensor((10, 4), "float32", "cuda:0"), i: R.Tensor((3,), "int64", "cuda:0")):
    with R.dataflow():
        doubled = R.add(x, x)
        taken = R.take(doubled, i, axis=0)
        out = R.nn.softmax(taken)
        R.output(out)
    return out


def test_strict_checks_of_a_gpu_stay_in_its_graph():
    try:
        executable = rh.compile(OnGpu, cache=False, checks="strict")
    except rh.BuildError as error:  # a machine without nvcc or nvrtc
        pytest.skip(str(error))
    (region,) = executable.metadata.regions
    assert region.runs == GRAPH and not executable.metadata.single_calls
    (record,) = [spec for spec in executable.metadata.constants if spec.is_record]
    assert record.shape == (16,) and record.device == 0
    assert Metadata.from_json(executable.metadata.to_json()).constants == executable.metadata.constants
