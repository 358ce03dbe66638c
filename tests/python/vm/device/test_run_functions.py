"""``relax.run.*``: results on the operand's device, equal to numpy's, also without the compiler."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.vm.device.builtins import nonzero, running_on, shape_to_tensor, unique

integers = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@ir_module("llvm", "llvm:1")
def Found(x: R.Tensor((4,), "float32", "llvm:1")):
    with R.dataflow():
        places: R.Tensor(dtype="int64", ndim=2, vdevice="llvm:1") = R.nonzero(x)
        values: R.Tensor(dtype="float32", ndim=1, vdevice="llvm:1") = R.unique(x)
        R.output(places, values)
    return (places, values)


def test_results_are_on_the_operands_device():
    places, values = rh.vm.VirtualMachine(rh.compile(Found))["main"](np.array([3, 0, 1, 3], "float32"))
    assert str(places.device) == str(values.device) == "cpu:1"
    np.testing.assert_array_equal(places.numpy(), [[0, 2, 3]])
    np.testing.assert_array_equal(values.numpy(), [0, 1, 3])


def test_nonzero_of_scalars_and_matrices():
    for array in (np.array(2.0), np.array(0.0), np.eye(3), np.zeros((0, 2))):
        expected = np.stack(np.atleast_1d(array).nonzero())
        np.testing.assert_array_equal(nonzero(tvm.runtime.tensor(array)).numpy(), expected)


@given(integers)
def test_unique_in_order_of_first_appearance(values):
    x = tvm.runtime.tensor(np.array(values), tvm.cpu(3))
    distinct, index, inverse, counts = (t.numpy() for t in unique(x, 0, 1, 1, 1))
    assert list(distinct) == list(dict.fromkeys(values))
    assert [values[i] for i in index] == list(distinct)
    assert [values.index(v) for v in distinct] == list(index)
    assert [distinct[i] for i in inverse] == values
    assert [values.count(v) for v in distinct] == list(counts)
    assert str(unique(x, 0, 0, 0, 0).device) == "cpu:3"


@given(integers)
def test_unique_sorted(values):
    x = tvm.runtime.tensor(np.array(values))
    expected = np.unique(values, return_inverse=True)
    np.testing.assert_array_equal(unique(x, 1, 0, 0, 0).numpy(), expected[0])
    distinct, inverse = unique(x, 1, 0, 1, 0)
    np.testing.assert_array_equal(distinct.numpy()[inverse.numpy()], values)


@pytest.mark.parametrize("ordered", [0, 1])
def test_unique_along_an_axis(ordered):
    rows = np.array([[2, 2], [1, 0], [2, 2]])
    for axis, array in ((0, rows), (1, rows.T), (-2, rows)):
        distinct, inverse = unique(tvm.runtime.tensor(array), ordered, 0, 1, 0, axis)
        assert inverse.shape == (3,)
        np.testing.assert_array_equal(np.take(distinct.numpy(), inverse.numpy(), axis), array)


def test_shapes_become_tensors_on_the_machines_host():
    assert str(shape_to_tensor((2, 3)).device) == "cpu:0"
    with running_on((tvm.cpu(0), tvm.cpu(6)), ("global", "global")):
        tensor = shape_to_tensor((2, 3))
    assert str(tensor.device) == "cpu:6"
    np.testing.assert_array_equal(tensor.numpy(), [2, 3])


def test_prints_and_assertions(capsys):
    show, require = (tvm.get_global_func(f"relax.run.{name}") for name in ("print", "assert_op"))
    x = tvm.runtime.tensor(np.array([1, 2]))
    show("", x, (x, 3))
    show("{} and {}", x, "text")
    assert capsys.readouterr().out == "[1 2] ([1 2], 3)\n[1 2] and text\n"
    require(True, "")
    require(tvm.runtime.tensor(np.array(True)), "")
    for template, message in (("", r"\[1 2\]"), ("x is {}", r"x is \[1 2\]")):
        with pytest.raises(AssertionError, match=message):
            require(tvm.runtime.tensor(np.array(False)), template, x)
    with pytest.raises(AssertionError, match="Assertion Failed"):
        require(False, "")
