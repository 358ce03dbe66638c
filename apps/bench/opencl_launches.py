"""Cost of launches on an OpenCL device: calls of one small kernel, command buffers of many, and the driver alone.

python apps/bench/opencl_launches.py                # beside CUDA
python apps/bench/opencl_launches.py --beside llvm
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import click
import numpy as np
from opencl_products import seconds
from smoke import smoke
from tvm import relax, runtime

import relax_hetero as rh
from relax_hetero.backends.opencl.devices import opencl_memory
from relax_hetero.backends.opencl.driver import driver

_EXTENT = 32
_ENQUEUES = 500
_KERNEL = "__kernel void increase(__global float* x) { x[get_global_id(0)] += 1; }"


def chain(count: int, device: str) -> tuple[rh.vm.VirtualMachine, list[Any]]:
    """A machine with `count` products, each of the result of the one before, and its arguments on the device."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((_EXTENT, _EXTENT), "float32")) for name in "xw")
    value = x
    with builder.function("main", [x, w]):
        with builder.dataflow():
            for _ in range(count):
                value = builder.emit(relax.op.matmul(value, w))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    mod = rh.transform.UpdateVDevice([rh.VDevice(device)])(builder.get())
    machine = rh.vm.VirtualMachine(rh.compile(mod))
    arrays = [np.linalg.qr(np.random.default_rng(i).standard_normal((_EXTENT, _EXTENT)))[0] for i in range(2)]
    expected = arrays[0] @ np.linalg.matrix_power(arrays[1], count)
    arguments = [runtime.tensor(array.astype("float32"), machine.devices[0]) for array in arrays]
    np.testing.assert_allclose(machine["main"](*arguments).numpy(), expected, atol=1e-4)
    return machine, arguments


def enqueue_seconds() -> dict[str, float]:
    """Time that the driver of the first device takes for a launch, by the kind of the kernel's argument."""
    import pyopencl

    device, times = opencl_memory().opened(0), {}
    kernel = pyopencl.Kernel(pyopencl.Program(device.context, _KERNEL).build(), "increase")
    sizes, address = (ctypes.c_size_t * 3)(64, 1, 1), device.allocate(4096, 64)
    buffer = pyopencl.Buffer(device.context, pyopencl.mem_flags.READ_WRITE, 4096)
    for kind, value in (("shared virtual memory", pyopencl.SVM((ctypes.c_char * 4096).from_address(address))),
                        ("a buffer", buffer)):  # fmt: skip
        kernel.set_arg(0, value)
        enqueue, arguments = driver().clEnqueueNDRangeKernel, (device.queue.int_ptr, kernel.int_ptr, 3)
        start = time.perf_counter()
        for _ in range(_ENQUEUES):
            enqueue(*arguments, None, sizes, sizes, 0, None, None)
        times[kind] = (time.perf_counter() - start) / _ENQUEUES
        device.queue.finish()
    device.free(address)
    return times


@click.command()
@click.option("--count", default=64, show_default=True, help="Kernels of the command buffer.")
@click.option("--beside", default="cuda", show_default=True, help="The other device.")
@smoke(count=3, beside="llvm")
def main(count: int, beside: str) -> None:
    """Time launches of small kernels on the first OpenCL device."""
    for name in ("opencl", beside):
        one, one_arguments = chain(1, name)
        many, arguments = chain(count, name)
        (region,) = many.executable.metadata.regions
        assert len(region.commands) >= count, "products are not fused"
        call, buffer = seconds(one["main"], one_arguments), seconds(many["main"], arguments)
        click.echo(
            f"{name}: {call * 1e6:.1f} us for a call of one kernel, {buffer * 1e6:.1f} us for one of {count} "
            f"({region.runs}): {(buffer - call) / (count - 1) * 1e6:.2f} us for each further kernel"
        )
    for kind, each in enqueue_seconds().items():
        click.echo(f"driver of {opencl_memory().name(0)}: {each * 1e6:.1f} us for a launch with {kind}")


if __name__ == "__main__":
    main()
