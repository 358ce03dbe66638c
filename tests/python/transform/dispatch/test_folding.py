"""Constant folding: no result that is many times larger than the constants it comes from."""

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.driver.pipeline import pipeline_steps
from relax_hetero.target.vdevice import with_vdevices


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
