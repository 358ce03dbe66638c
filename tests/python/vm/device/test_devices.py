"""Manifest entries to physical devices: lists, maps, and everything that does not fit."""

import json

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.vm.device.devices import bind_devices

X, W = np.zeros((2, 4), "float32"), np.ones(4, "float32")


def manifest(*kinds, host=-1):
    devices = tuple(rh.vm.DeviceSpec(json.dumps({"kind": kind}), i, "global", i == 0) for i, kind in enumerate(kinds))
    return rh.vm.Metadata(devices, host, {})


def names(devices):
    return [str(device) for device in devices]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, ["cpu:0", "cpu:1"]),
        ([tvm.cpu(3), "cpu:2"], ["cpu:3", "cpu:2"]),
        ((tvm.cpu(0), tvm.cpu(0)), ["cpu:0", "cpu:0"]),
        ({}, ["cpu:0", "cpu:1"]),
        ({"llvm:1": "cpu:4"}, ["cpu:0", "cpu:4"]),
        ({"llvm": tvm.cpu(4)}, ["cpu:4", "cpu:1"]),
        ({"vdevice:1": "cpu"}, ["cpu:0", "cpu:0"]),
        ({1: "cpu:7", 0: "cpu:6"}, ["cpu:6", "cpu:7"]),
        ({tvm.cpu(1): "cpu:5"}, ["cpu:0", "cpu:5"]),
        ({rh.vm.DeviceSpec('{"kind": "llvm"}', 1): "cpu:5"}, ["cpu:0", "cpu:5"]),
    ],
)
def test_lists_and_maps(devices, expected):
    assert names(bind_devices(manifest("llvm", "llvm"), devices)) == expected


def test_vdevices_as_keys(chain):
    vdevice = tvm.relax.VDevice("llvm", 1)
    vm = rh.vm.VirtualMachine(chain, {vdevice: tvm.cpu(9)})
    assert names(vm.devices) == ["cpu:0", "cpu:9"]
    assert str(vm["main"](X, W)[0].device) == "cpu:9"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([tvm.cpu(0)], "1 devices given, expected 2: llvm:0, llvm:1"),
        ([tvm.cpu(0)] * 3, "3 devices given, expected 2"),
        (tvm.cpu(0), "expected None, a list with one device per entry"),
        ("cpu", "expected None, a list with one device per entry"),
        ({"llvm:2": "cpu"}, "the manifest has no device 'llvm:2'; it has 'llvm:0', 'llvm:1', 'vdevice:0', 'vdevice:1'"),
        ({"lvm:1": "cpu"}, "did you mean 'llvm:1'"),
        ({"llvm:one": "cpu"}, "no device 'llvm:one'"),
        ({"vdevice": "cpu"}, "no device 'vdevice'"),
        ({2: "cpu"}, "no device 2"),
        ({-1: "cpu"}, "no device -1"),
        ({True: "cpu"}, "no device True"),
        ({tvm.cpu(2): "cpu"}, "no device cpu:2"),
        ({None: "cpu"}, "no device None"),
        ({"llvm:0": "cpu", 0: "cpu:1"}, "llvm:0 is given twice: as 'llvm:0' and as 0"),
        (["cpu", "gpu?"], "'gpu\\?' is not a device"),
        (["cpu", 1], r"1 \(int\) is not a device"),
        (["cpu", "cuda"], "llvm:1 was compiled for a cpu device .*, found cuda:0"),
        (["cpu", "cpu:-1"], "llvm:1 is to run on cpu:-1, which this machine does not have"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(devices, message):
    with pytest.raises(rh.BindingError, match=message):
        bind_devices(manifest("llvm", "llvm"), devices)


def test_other_device_types():
    with pytest.raises(rh.BindingError, match="cuda:0 was compiled for a cuda device .*, found cpu:0"):
        bind_devices(manifest("llvm", "cuda"), ["cpu", "cpu"])
    with pytest.raises(rh.BindingError, match="cuda:0 is to run on cuda:99, which this machine does not have"):
        bind_devices(manifest("llvm", "cuda"), {"cuda": "cuda:99"})


def test_a_manifest_without_devices():
    assert bind_devices(manifest()) == []
    with pytest.raises(rh.BindingError, match="1 devices given, expected 0: none"):
        bind_devices(manifest(), ["cpu"])


def test_the_callers_list_is_left_alone(chain):
    devices = [tvm.cpu(0), tvm.cpu(1)]
    rh.vm.VirtualMachine(chain, devices)
    assert names(devices) == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:0"], ["cpu:1", "cpu:0"], ["cpu:5", "cpu:6"]])
def test_any_mapping_computes_the_same(chain, devices):
    vm = rh.vm.VirtualMachine(chain, devices)
    z, y = vm["main"](X, W)
    np.testing.assert_array_equal(z.numpy(), np.full((2, 4), 2))
    assert names([y, z][i].device for i in range(2)) == devices
