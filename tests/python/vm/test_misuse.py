"""Values and objects that only look right: refused by name, never a wrong number or TVM's own error."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tvm

import relax_hetero as rh

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
W = np.array([1, 2, 3, 4], "float32")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_neither_executables_nor_machines_are_pickled(chain, duplicate):
    vm = rh.vm.VirtualMachine(chain)
    with pytest.raises(rh.HeteroError, match="use export_library, and relax_hetero.load"):
        duplicate(chain)
    with pytest.raises(rh.HeteroError, match="make one from the Executable"):
        duplicate(vm)
    with pytest.raises(rh.HeteroError, match="make one from the Executable"):
        pickle.dumps(vm["main"])


def test_masks_are_not_dropped(chain):
    vm = rh.vm.VirtualMachine(chain)
    with pytest.raises(rh.BindingError, match="'x' of 'main' is a masked array"):
        vm["main"](np.ma.masked_array(X, mask=X > 0), W)


@pytest.mark.parametrize("value", [1e300, -1e300, 10**60])
def test_scalars_that_would_become_infinite(plumbing, value):
    with pytest.raises(rh.BindingError, match="does not fit float32"):
        rh.vm.VirtualMachine(plumbing)["scalar"](value)


def test_infinite_scalars_are_taken(plumbing):
    assert rh.vm.VirtualMachine(plumbing)["scalar"](float("inf")).numpy() == np.inf


def test_results_that_would_overwrite_each_other(chain):
    vm = rh.vm.VirtualMachine(chain)
    one, rows = np.empty((3, 4), "float32"), np.empty((6, 4), "float32")
    tensor = tvm.runtime.empty((3, 4), "float32", tvm.cpu(0))
    for out in ((one, one), (rows[:3], rows[2:5]), (tensor, tensor), (tensor, np.from_dlpack(tensor))):
        with pytest.raises(rh.BindingError, match=r"out\[0\] and out\[1\] share memory"):
            vm["main"](X, W, out=out)
    vm["main"](X, W, out=(rows[::2], rows[1::2]))
    np.testing.assert_allclose(rows[1::2], np.exp(X), rtol=1e-6)


@pytest.mark.parametrize("path", [None, 5, ["a.so"]])
def test_arguments_that_are_not_paths(chain, path):
    with pytest.raises(rh.BuildError, match="loading an executable: found .*; expected a path"):
        rh.load(path)
    with pytest.raises(rh.BuildError, match="exporting an executable: found .*; expected a path"):
        chain.export_library(path)


@pytest.mark.parametrize("params", [None, 3, "w"])
def test_parameters_of_another_kind(weighted, params):
    with pytest.raises(rh.BindingError, match="expected a mapping or a sequence"):
        rh.vm.VirtualMachine(weighted).set_params(params)


def test_compiler_names_without_the_compiler():
    script = (
        "import relax_hetero as rh, sys; rh.vm\ntry: getattr(rh, sys.argv[1])\nexcept rh.HeteroError as e: print(e)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TVM_USE_RUNTIME_LIB": "1"}
    for name in ("compile", "from_onnx"):
        done = subprocess.run([sys.executable, "-c", script, name], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == f"relax_hetero.{name} needs TVM's compiler: found TVM's runtime only", done.stderr


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "60", None])
def test_limits_of_waits_that_are_no_times(chain, seconds):
    with pytest.raises(rh.BindingError, match="collective_timeout is .*, expected a positive number of seconds"):
        rh.vm.VirtualMachine(chain, collective_timeout=seconds)
