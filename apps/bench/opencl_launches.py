"""Cost of launches on an OpenCL device: host time of calls of one small kernel, and of a command buffer of many.

python apps/bench/opencl_launches.py                # beside CUDA
python apps/bench/opencl_launches.py --beside llvm
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from opencl_products import seconds
from smoke import smoke
from tvm import relax, runtime

import relax_hetero as rh
from relax_hetero.target.backend import backend_of_device

_ROWS, _COLUMNS = 4, 64


def chain(count: int, device: str) -> tuple[rh.vm.VirtualMachine, list[Any]]:
    """A machine with `count` kernels, each of the result of the one before, and its arguments on the device."""
    builder = relax.BlockBuilder()
    x = value = relax.Var("x", relax.TensorType((_ROWS, _COLUMNS), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            for _ in range(count):
                value = builder.emit(relax.op.nn.softmax(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    mod = rh.transform.UpdateVDevice([rh.VDevice(device)])(builder.get())
    machine = rh.vm.VirtualMachine(rh.compile(mod))
    array = np.random.default_rng(0).standard_normal((_ROWS, _COLUMNS)).astype("float32")
    expected = array.astype("float64")
    for _ in range(count):
        powers = np.exp(expected - expected.max(-1, keepdims=True))
        expected = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(machine["main"](array).numpy(), expected, rtol=1e-3)
    return machine, [runtime.tensor(array, machine.devices[0])]


@click.command()
@click.option("--count", default=64, show_default=True, help="Kernels of the command buffer.")
@click.option("--opencl", default="opencl", show_default=True, help="The OpenCL device.")
@click.option("--beside", default="cuda", show_default=True, help="The other device.")
@smoke(count=3, beside="llvm")
def main(count: int, opencl: str, beside: str) -> None:
    """Time launches of small kernels on an OpenCL device."""
    for name in (opencl, beside):
        one, one_arguments = chain(1, name)
        many, arguments = chain(count, name)
        call = seconds(one["main"], one_arguments)
        buffer = seconds(many["main"], arguments)
        (region,) = many.executable.metadata.regions
        device = backend_of_device(many.devices[0]).device_name(many.devices[0].index) if name != "llvm" else "CPU"
        click.echo(
            f"{name} ({device}): {call * 1e6:.1f} us for a call of one kernel, {buffer * 1e6:.1f} us for one of "
            f"{count} ({region.runs}): {(buffer - call) / (count - 1) * 1e6:.2f} us for each further kernel"
        )


if __name__ == "__main__":
    main()
