"""Strict checks on NVIDIA GPUs: a wrong index or divisor raises at the fence, or where the host first reads."""

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]

EXTREMES = [10, -11, 2**31, 2**40, -(2**31) - 1, 2**63 - 1, -(2**63)]
X = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")


# Sizes that only a call knows, so that kernels are launched one by one; no CPU is among the vdevices.
@ir_module({"kind": "cuda", "arch": "sm_90"})
def Symbolic(
    x: R.Tensor(("n", 4), "float32", "cuda:0"),
    i: R.Tensor(("m",), "int64", "cuda:0"),
    d: R.Tensor(("m",), "int32", "cuda:0"),
):
    with R.dataflow():
        a = R.exp(R.take(x, i, axis=0))
        b = R.floor_divide(R.add(d, d), d)
        R.output(a, b)
    return a, b


# All sizes are known, so that a CUDA graph launches the kernels.
@ir_module({"kind": "cuda", "arch": "sm_90"})
def Static(
    x: R.Tensor((10, 4), "float32", "cuda:0"),
    i: R.Tensor((3, 2), "int64", "cuda:0"),
    u: R.Tensor((3,), "float32", "cuda:0"),
    e: R.Tensor((3, 4), "int32", "cuda:0"),
):
    with R.dataflow():
        doubled = R.add(x, x)
        picked = R.exp(R.gather_nd(doubled, i))
        placed = R.scatter_nd(doubled, i, u)
        gathered = R.add(R.gather_elements(placed, R.astype(e, "int64"), axis=0), R.const(1.0))
        R.output(picked, placed, gathered)
    return picked, placed, gathered


def machine(mod, checks="strict"):
    return rh.vm.VirtualMachine(rh.compile(mod, cache=False, checks=checks))


@pytest.fixture(scope="module")
def symbolic():
    return machine(Symbolic)


@pytest.fixture(scope="module")
def static():
    return machine(Static)


def good(vm):
    i, d = np.array([0, 9, -1, -10]), np.array([1, -2, 3, 2], "int32")
    for gathered, quotient in (vm["main"](X, i, d), vm.submit("main", X, i, d).result(60)):
        np.testing.assert_allclose(np.asarray(gathered), np.exp(X[i]), rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(quotient), np.full(4, 2))


@pytest.mark.parametrize("index", EXTREMES)
def test_a_wrong_index_raises_where_the_host_waits(symbolic, index):
    i, d = np.array([0, index, 1]), np.ones(3, "int32")
    message = rf"op relax.take of variable .* in function 'main': index {index} is out of range, expected -10 to 9"
    good(symbolic)
    with pytest.raises(rh.HeteroError, match=message):
        symbolic.submit("main", X, i, d).result(60)
    good(symbolic)
    result = symbolic["main"](X, i, d)
    with pytest.raises(rh.HeteroError, match=message):
        np.asarray(result[0])
    np.asarray(result[0])  # told once
    good(symbolic)
    out = np.empty((3, 4), "float32"), np.empty(3, "int32")
    with pytest.raises(rh.HeteroError, match=message):
        symbolic["main"](X, i, d, out=out)
    good(symbolic)


def test_a_divisor_of_0_raises(symbolic):
    with pytest.raises(rh.HeteroError, match="op relax.floor_divide of variable .*: an integer is divided by 0"):
        symbolic["main"](X, np.array([0, 1]), np.array([1, 0], "int32"))[1].numpy()
    good(symbolic)


def test_one_of_many_errors_is_reported(symbolic):
    i, d = np.arange(10, 100_010), np.zeros(100_000, "int32")
    with pytest.raises(rh.HeteroError, match="is out of range, expected -10 to 9|divided by 0") as raised:
        symbolic["main"](X, i, d)[0].numpy()
    if "index" in str(raised.value):
        assert 10 <= int(str(raised.value).split("index ")[1].split()[0]) < 100_010
    good(symbolic)


def test_extents_of_0(symbolic):
    gathered, quotient = symbolic["main"](X, np.empty(0, "int64"), np.empty(0, "int32"))
    assert gathered.numpy().shape == (0, 4) and quotient.numpy().shape == (0,)
    with pytest.raises(rh.HeteroError, match="index 0 is out of range, expected none, as the axis is empty"):
        symbolic["main"](X[:0], np.array([0]), np.array([1], "int32"))[0].numpy()
    good(symbolic)


def test_a_graph_reports_in_every_launch(static):
    assert len(static.graphs) >= 1
    i = np.array([[0, 0], [9, 3], [-1, -4]])
    i_other = np.array([[0, 0], [9, 3], [-2, -4]])
    u, e = np.arange(3, dtype="float32"), np.tile(np.array([0, -10, 9, -1], "int32"), (3, 1))
    wrong = (
        (np.array([[0, 0], [10, 3], [1, 1]]), e, "index 10 is out of range, expected -10 to 9"),
        (np.array([[0, 0], [9, -5], [1, 1]]), e, "index -5 is out of range, expected -4 to 3"),
        (i, np.where(e == 9, 10, e).astype("int32"), "relax.gather_elements .*index 10 is out of range"),
    )
    for round_ in range(4):
        places = (i, i_other)[round_ % 2]
        picked, placed, gathered = static["main"](X, places, u, e)
        doubled = X + X
        np.testing.assert_allclose(picked.numpy(), np.exp(doubled[tuple(places.T)]), rtol=1e-5)
        expected = doubled.copy()
        expected[tuple(places.T)] = u
        np.testing.assert_allclose(placed.numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(gathered.numpy(), np.take_along_axis(expected, e % 10, 0) + 1, rtol=1e-6)
        for indices, elements, message in wrong:
            with pytest.raises(rh.HeteroError, match=message):
                static["main"](X, indices, u, elements)[0].numpy()
            with pytest.raises(rh.HeteroError, match=message):
                static.submit("main", X, indices, u, elements).result(60)


def test_checks_outlast_a_file(tmp_path):
    rh.compile(Symbolic, cache=False, checks="strict").export_library(str(tmp_path / "strict.so"))
    vm = rh.vm.VirtualMachine(rh.load(str(tmp_path / "strict.so")))
    with pytest.raises(rh.HeteroError, match="op relax.take .*: index 10 is out of range"):
        vm["main"](X, np.array([10]), np.ones(1, "int32"))[0].numpy()
    good(vm)


def test_default_checks_refuse_nothing():
    vm = machine(Symbolic, "default")
    gathered, quotient = vm["main"](X, np.array([10, -11, 3]), np.array([0, 0, 1], "int32"))
    np.testing.assert_allclose(gathered.numpy(), np.exp(X[[9, 0, 3]]), rtol=1e-5)
    np.testing.assert_array_equal(quotient.numpy(), [0, 0, 2])
