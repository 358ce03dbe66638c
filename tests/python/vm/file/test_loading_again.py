"""One file loaded several times in a process: each executable has code of its own, and may end before the others."""

import gc
import sys

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from seeds import fresh_rng

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@ir_module()
def Exponential(x: R.Tensor((4,), "float32")):
    with R.dataflow():
        y = R.call_dps_packed("test.loading_again", (x,), out_ty=R.Tensor((4,), "float32"))
        z = R.exp(y)
        R.output(z)
    return z


@pytest.fixture
def file(tmp_path):
    tvm.register_global_func("test.loading_again", lambda a, b: b.copyfrom(a.numpy() + 1), override=True)
    path = tmp_path / "exponential_again.so"
    rh.compile(Exponential, cache=False).export_library(path)
    return path


def check(executable):
    x = fresh_rng().random(4, "float32")
    np.testing.assert_allclose(rh.vm.VirtualMachine(executable)["main"](x).numpy(), np.exp(x + 1), rtol=1e-5)


def mapped(name):
    """The files (inode numbers) of that name whose code is in memory."""
    with open("/proc/self/maps") as maps:
        fields = [line.split() for line in maps if name in line]
    return {inode for _, access, _, _, inode, *_ in fields if "x" in access}


@linux_only
def test_each_has_code_of_its_own(file):
    first, second = rh.load(file), rh.load(file)
    assert len(mapped(file.name)) == 2
    check(first)
    check(second)


@linux_only
@pytest.mark.parametrize("which", [0, 1])
def test_one_ends_before_the_other(file, which):
    executables = [rh.load(file), rh.load(file)]
    for executable in executables:
        check(executable)
    del executable, executables[which]
    gc.collect()
    assert len(mapped(file.name)) == 1
    check(executables[0])
    check(rh.load(file))
