"""`to_device`: from a manifest index to the device that the running machine has for it."""

import gc

import numpy as np
import pytest
import tvm
import tvm_ffi

import relax_hetero as rh
from relax_hetero.vm.device.builtins import running_on, to_device
from relax_hetero.vm.device.tensors import has_offset

DEVICES = (tvm.cpu(0), tvm.cpu(4), tvm.cpu(2))
SCOPES = ("global", "global", "global")
DATA = np.arange(6, dtype="float32").reshape(2, 3)


def test_cpus_share_memory():
    x = tvm.runtime.tensor(DATA)
    view = x._create_view((3,), "float32", 12)
    with running_on(DEVICES, SCOPES):
        assert to_device(x, 0).same_as(x)
        moved = to_device(x, 1)
        assert str(moved.device) == "cpu:4" and moved.data_ptr() == x.data_ptr()
        assert str(to_device(x, -1).device) == "cpu:2"
        part = to_device(view, 1)
    assert part.data_ptr() == x.data_ptr() + 12 and not has_offset(part)
    del x, view
    gc.collect()
    np.testing.assert_array_equal(moved.numpy(), DATA)  # which keeps the memory
    np.testing.assert_array_equal(part.numpy(), DATA[1])


def test_a_copy_can_be_demanded():
    x = tvm.runtime.tensor(DATA)
    with running_on(DEVICES, SCOPES):
        for index in (0, 1):
            again = to_device(x, index, 1)
            assert again.device == DEVICES[index] and again.data_ptr() != x.data_ptr()
            np.testing.assert_array_equal(again.numpy(), DATA)


def test_special_memory_scopes_are_always_copied():
    x = tvm.runtime.tensor(DATA)
    with running_on((tvm.cpu(0), tvm.cpu(0)), ("global.texture", "global")):
        with pytest.raises(Exception, match="texture"):  # the CPU lacks such memory; it was asked for
            to_device(x, 0)


def test_tuples_and_views():
    x = tvm.runtime.tensor(DATA)
    view = x._create_view((3,), "float32", 12)
    with running_on(DEVICES, SCOPES):
        first, (second,) = to_device(tvm_ffi.convert((x, (view,))), 1)
    np.testing.assert_array_equal(first.numpy(), DATA)
    np.testing.assert_array_equal(second.numpy(), DATA[1])


def test_machines_nest():
    with running_on(DEVICES, SCOPES):
        with running_on(DEVICES[::-1], SCOPES):
            assert str(to_device(tvm.runtime.tensor(DATA), 0).device) == "cpu:2"
        assert str(to_device(tvm.runtime.tensor(DATA), 1).device) == "cpu:4"


def test_outside_of_a_machine():
    with pytest.raises(rh.HeteroError, match="called outside of relax_hetero.vm.VirtualMachine"):
        to_device(tvm.runtime.tensor(DATA), 0)


def test_a_copy_goes_where_there_is_room():
    x = tvm.runtime.tensor(DATA)
    target = tvm.runtime.tensor(np.full((2, 3), np.nan, "float32"), tvm.cpu(4))
    with running_on(DEVICES, SCOPES):
        assert to_device(x, 0, 0, target).same_as(x)
        assert to_device(x, 1, 0, target).data_ptr() == x.data_ptr()
        assert np.isnan(target.numpy()).all()  # nothing was copied
        moved = to_device(x, 1, 1, target)
    assert moved.data_ptr() == target.data_ptr()
    np.testing.assert_array_equal(moved.numpy(), DATA)
