"""Matrix products of float32 on an OpenCL device, beside those of another device of this library: host time of calls.

python apps/bench/opencl_products.py                           # beside CUDA's kernels for plain threads, the bar of 0.7
python apps/bench/opencl_products.py --beside llvm --shapes 256
"""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np
from bars import Check, geometric_mean, verdict
from peers.shape import Shape
from smoke import smoke
from tvm import relax, runtime

import relax_hetero as rh

SHAPES = "4096,2048,1024,512,4096x4096x1024,128x4096x4096,127x255x511"
"""M × K × N."""
BAR = 0.7
_SECONDS = 0.3
"""Approximate time of a measurement."""


def product(shape: Shape, device: str) -> tuple[Any, list[Any]]:
    """A function of a machine, and its arguments on the device."""
    builder = relax.BlockBuilder()
    shapes = ((shape.m, shape.k), (shape.k, shape.n))
    params = [relax.Var(name, relax.TensorType(each, "float32")) for name, each in zip("xw", shapes, strict=True)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(*params))
        builder.emit_func_output(result)
    mod = rh.transform.UpdateVDevice([rh.VDevice(device)])(builder.get())
    machine = rh.vm.VirtualMachine(rh.compile(mod))
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(each, "float32") for each in shapes]
    result = machine["main"](*arrays).numpy()
    expected = arrays[0] @ arrays[1]
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    assert error < 1e-4, f"{shape} on {device}: error {error:.1e}"
    return machine["main"], [runtime.tensor(array, machine.devices[0]) for array in arrays]


def seconds(function: Any, arguments: list[Any]) -> float:
    """Time of a call, in a sequence of calls."""
    device, count = arguments[0].device, 1
    while True:
        device.sync()
        start = time.perf_counter()
        for _ in range(count):
            function(*arguments)
        device.sync()
        elapsed = time.perf_counter() - start
        if elapsed > _SECONDS or count > 10_000:
            return elapsed / count
        count = max(2 * count, int(count * _SECONDS / max(elapsed, 1e-6)))


@click.command()
@click.option("--shapes", default=SHAPES, show_default=True, help="MxKxN, or N for a cube; a list.")
@click.option("--opencl", default="opencl", show_default=True, help="The OpenCL device.")
@click.option("--beside", default="cuda", show_default=True, help="The other device.")
@smoke(shapes="64", beside="llvm")
def main(shapes: str, opencl: str, beside: str) -> None:
    """Time products of float32 on an OpenCL device."""
    ratios = []
    for text in shapes.split(","):
        shape = Shape.parse(text)
        times = [seconds(*product(shape, device)) for device in (opencl, beside)]
        rates = [shape.operations / each / 1e9 for each in times]
        ratios.append(times[1] / times[0])
        click.echo(f"{text:>16}: {rates[0]:9.1f} GFLOP/s, {beside} {rates[1]:9.1f} GFLOP/s: {ratios[-1]:.2f}")
    check = Check(f"geometric mean over {beside}", geometric_mean(ratios), BAR)
    click.echo(f"{check}: {verdict(check)}")


if __name__ == "__main__":
    main()
