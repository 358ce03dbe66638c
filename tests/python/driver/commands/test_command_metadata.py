"""Metadata of command buffers in executables: constants by index, kernels by address, costs of kernels."""

import ctypes

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.artifact.kernel_addresses import kernel_address
from relax_hetero.vm.region.walk_commands import Kernel, Memory, walk
from seeds import fresh_rng

RNG = np.random.default_rng(7)
W, V = RNG.random((8, 8), "float32"), RNG.random(8, "float32")


@I.ir_module
class Model:
    """Two regions on two devices; a public kernel that one of them calls, and another that is never called."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @T.prim_func
    def shift(A: T.Buffer((8,), "float32"), V: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(8):
            B[i] = A[i] + V[i]

    @T.prim_func
    def spare(a: T.handle, s: T.float32, b: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            B[i] = A[i] * s

    @R.function
    def main(x: R.Tensor((8,), "float32", "llvm:0"), y: R.Tensor((8, 8), "float32", "llvm:1")):
        cls = Model
        a = R.call_tir(cls.shift, (x, R.const(V)), out_ty=R.Tensor((8,), "float32", "llvm:0"))
        b = R.call_tir(cls.shift, (a, R.const(V * 2)), out_ty=R.Tensor((8,), "float32", "llvm:0"))
        c = R.matmul(y, R.const(W))
        d = R.nn.softmax(R.matmul(c, R.const(W)))
        return (b, d)


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Model)


def test_directs_are_indices_of_the_constants(exe):
    first, second = exe.metadata.regions
    np.testing.assert_array_equal([exe.constants[i].numpy() for i in first.directs], [V, V * 2])
    assert [exe.metadata.constants[i].device for i in second.directs] == [1] * len(second.directs) != []
    assert all(slot.alignment == 16 for region in (first, second) for slot in region.slots)


def test_regions_run_from_their_metadata(exe):
    """The metadata, the constants and the code suffice to run a region."""
    region = exe.metadata.regions[0]
    code = exe.runnable_module()
    rh.vm.VirtualMachine(exe)  # loads the code
    kernels = {
        name: Kernel(spec, kernel_address(code, spec.symbol), code) for name, spec in exe.metadata.kernels.items()
    }
    x, result, arena = (
        fresh_rng().random(8, "float32"),
        np.full(8, np.nan, "float32"),
        np.full(region.arena, 0xFF, "uint8"),
    )
    directs = [exe.constants[index].data_ptr() for index in region.directs]
    walk(region.commands, kernels, Memory([x.ctypes.data, result.ctypes.data], directs, arena.ctypes.data), {})
    np.testing.assert_array_equal(result, (x + V) + V * 2)


def test_public_kernels_can_be_called_whether_or_not_a_region_does(exe):
    assert {"shift", "spare"} <= set(exe.metadata.kernels)
    spare = exe.metadata.kernels["spare"]
    assert [(tensor.shape, tensor.access) for tensor in spare.tensors] == [(("n",), "read"), (("n",), "write")]
    kernel = Kernel(spare, kernel_address(exe.runnable_module(), spare.symbol), exe.runnable_module())
    x, y = fresh_rng().random(5, "float32"), np.full(6, np.nan, "float32")
    assert kernel.function(x.ctypes.data, y.ctypes.data, 5, ctypes.c_float(3)) == 0
    np.testing.assert_array_equal(y[:5], x * np.float32(3))
    assert np.isnan(y[5])


def test_dispatches_list_the_kernels_of_regions(exe):
    dispatches = exe.metadata.dispatches
    assert not dispatches.keys() & {region.name for region in exe.metadata.regions}
    assert (dispatches["shift"].device, dispatches["shift"].bytes) == (0, 3 * 8 * 4)
    products = [spec for spec in dispatches.values() if "matmul" in spec.ops]
    assert products and all(spec.device == 1 and spec.operations == 2 * 8**3 for spec in products)


def test_without_command_buffers_there_are_public_kernels_only():
    plain = rh.compile(Model, command_buffers=False).metadata
    assert (plain.regions, plain.single_calls, set(plain.kernels)) == ((), (), {"shift", "spare"})


def test_lowered_modules_say_the_same(exe):
    assert rh.compile(rh.get_pipeline()(Model)).metadata.regions == exe.metadata.regions
