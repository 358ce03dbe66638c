"""Constant folding: no result that is many times larger than its constants, no kernel of a device that is not there."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.vm.device.tensors import share_or_copy


def test_no_constant_is_folded_that_would_fill_the_memory():
    one = relax.const(1.0, "float32")
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            filled = builder.emit(relax.op.broadcast_to(one, (4096, 2048)))
            result = builder.emit_output(builder.emit(relax.op.add(filled, one)))
        builder.emit_func_output(result)
    executable = rh.compile(builder.get(), cache=False)
    assert sum(np.prod(spec.shape) for spec in executable.metadata.constants) <= 2
    assert (rh.vm.VirtualMachine(executable)["main"]().numpy() == 2).all()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_constants_within_others_are_aligned_before_kernels_read_them(dtype):
    """Parts of weights over a mesh are such views; kernels load aligned vectors."""
    array = np.arange(200).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    at = next(begin for begin in range(8, 72) if (array.ctypes.data + begin * array.itemsize) % 16 == 8)
    part = array[at : at + 96].reshape(4, 24)
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.op.astype(relax.const(share_or_copy(part)), "int32")))
        builder.emit_func_output(result)
    vm = rh.vm.VirtualMachine(rh.compile(builder.get(), cache=False))
    np.testing.assert_array_equal(vm["main"]().numpy(), part.astype("int32"))


def test_constants_within_others_are_aligned_where_they_are_stored():
    """Kernels of a CPU that read them at run time load aligned vectors, too."""
    array = np.arange(200) % 3 == 0
    at = next(begin for begin in range(16) if (array.ctypes.data + begin) % 16 == 2)
    mask = array[at : at + 64]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([64], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            zero = relax.const(np.zeros(1, "float32"))
            result = builder.emit_output(builder.emit(relax.op.where(relax.const(share_or_copy(mask)), x, zero)))
        builder.emit_func_output(result)
    values = np.arange(64, dtype="float32")
    vm = rh.vm.VirtualMachine(rh.compile(builder.get(), cache=False))
    np.testing.assert_array_equal(vm["main"](values).numpy(), values * mask)


@ir_module({"kind": "cuda", "arch": "sm_90"})
class WrittenForAGpu:
    """Its kernel reads constants only."""

    @T.prim_func(private=True, s_tir=True)
    def double(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"target": T.target({"kind": "cuda", "arch": "sm_90"}), "tirx.is_scheduled": True})
        for i in T.thread_binding(T.int64(8), thread="threadIdx.x"):
            with T.sblock("double"):
                v = T.axis.spatial(T.int64(8), i)
                y[v] = x[v] * T.float32(2)

    @R.function
    def main(x: R.Tensor((8,), "float32", "cuda:0")) -> R.Tensor((8,), "float32", "cuda:0"):
        cls = WrittenForAGpu
        with R.dataflow():
            doubled = R.call_tir(
                cls.double, (R.const(np.ones(8, "float32")),), out_ty=R.Tensor((8,), "float32", "cuda:0")
            )
            result = R.add(x, doubled)
            R.output(result)
        return result


def test_kernels_written_for_a_gpu_are_not_run_here():
    symbols = list(rh.compile(WrittenForAGpu, cache=False).metadata.dispatches)
    assert any("double" in symbol for symbol in symbols), symbols


def test_kernels_of_gpus_are_not_run_on_the_cpu():
    values = relax.const(np.ones((4, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.op.nn.softmax(values)))
        builder.emit_func_output(result)
    gpu = rh.VDevice({"kind": "cuda", "arch": "sm_90a"})
    mod = with_vdevices(builder.get(), [gpu])
    for step in pipeline_steps(command_buffers=False):
        mod = step.run(mod)
        if step.name == "FormDispatches":
            break
    targets = [func.attrs["target"].kind.name for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    assert targets == ["cuda"]
