"""One matrix product on two CPU devices that store their tensors in different layouts.

python apps/data_tiling_two_devices/run.py                      # 2x3 times 3x5, this CPU and portable C
python apps/data_tiling_two_devices/run.py --m 500 --k 300 --n 700
python apps/data_tiling_two_devices/run.py --vdevice llvm --vdevice '{"kind": "llvm", "mcpu": "x86-64-v3"}' --ir
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.target.vdevice import device_name, parse_vdevices, vdevices_of

PASSES = ("RealizeVDevice", "SetEncoding", "PropagateEncodings", "SpecializeEncodings")
DIMS = {"lhs": "mk", "rhs": "kn"}  # all other tensors have the result's extents


@I.ir_module
class Product:
    """``lhs * rhs`` on both devices, added on the second, returned to the first; every extent is symbolic."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("c", 1)]})

    @R.function
    def main(lhs: R.Tensor(("m", "k"), "float32", "vdevice:0"), rhs: R.Tensor(("k", "n"), "float32", "vdevice:0")):  # noqa: F821
        with R.dataflow():
            product = R.matmul(lhs, rhs)
            product_moved = R.to_vdevice(product, "vdevice:1")
            lhs_moved = R.to_vdevice(lhs, "vdevice:1")
            rhs_moved = R.to_vdevice(rhs, "vdevice:1")
            product_there = R.matmul(lhs_moved, rhs_moved)
            total = R.add(product_moved, product_there)
            result = R.to_vdevice(total, "vdevice:0")
            R.output(result)
        return result


def inputs(m: int, k: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """1, 2, ... 6 and ones for the README's shapes, else small random integers, whose sums are exact."""
    if (m, k, n) == (2, 3, 5):
        return np.arange(1, 7, dtype="float32").reshape(2, 3), np.ones((3, 5), "float32")
    generator = np.random.default_rng(seed)
    lhs, rhs = (generator.integers(-8, 9, shape).astype("float32") for shape in ((m, k), (k, n)))
    return lhs, rhs


def stages(module: tvm.IRModule) -> dict[str, tvm.IRModule]:
    """The module after each pass, up to SpecializeEncodings, which asks the devices for layouts."""
    modules = {}
    for name in PASSES:
        module = getattr(rh.transform, name)()(module)
        modules[name] = module
    return modules


def purposes_table(report: rh.transform.EncodingReport) -> Table:
    """The role of every tensor."""
    table = Table(title="Before specialization: the roles of tensors", title_justify="left")
    for column in ("device", "op", "operand", "encoding"):
        table.add_column(column, overflow="fold")
    for op in report.ops:
        head = [op.device, shown_op(op)]
        for operand in op.operands:
            table.add_row(*map(Text, (*head, operand.role, operand.encoding)))
            head = ["", ""]
    return table


def layouts_table(report: rh.transform.EncodingReport, sizes: dict[str, int]) -> Table:
    """Layouts and bytes of tensors on the device of each op, for any extents and for those of this run."""
    table = Table(title="After specialization: how each device stores them", title_justify="left")
    run = "m={m}, k={k}, n={n}".format(**sizes)
    for column in ("device", "op", "operand", "layout", "packed", "bytes stored", f"stored for {run}", "bytes", "of"):
        table.add_column(column, overflow="fold", justify="right" if column in ("bytes", "of") else "left")
    for op in report.ops:
        head = [op.device, shown_op(op)]
        for operand in op.operands:
            shape = [sizes[dim] for dim in DIMS.get(operand.role, "mn")]
            layout = rh.encoding.PackedLayout.parse(operand.layout)
            stored = "×".join(map(str, layout.packed_shape(shape)))
            before = int(np.prod(shape)) * np.dtype(operand.dtype).itemsize
            after = layout.storage_bytes(shape, operand.dtype)
            cells = (operand.role, operand.layout, operand.packed, operand.bytes_after, stored, after, before)
            table.add_row(*(Text(str(cell)) for cell in (*head, *cells)))
            head = ["", ""]
    return table


def shown_op(op: Any) -> str:
    """An encoded op and its kernel's epilogue."""
    return f"{op.variable}: {op.op}" + (f", then {op.epilogue}" if op.epilogue else "")


def transfers_table(module: tvm.IRModule, sizes: dict[str, int]) -> Table:
    """Tensors that cross devices, and their layout on the way."""
    table = Table(title="Transfers", title_justify="left")
    for column in ("tensor", "to", "stored as", "bytes", "laid out anew"):
        table.add_column(column, overflow="fold", justify="right" if column == "bytes" else "left")
    encoded = {entry.variable: entry for entry in rh.transform.describe_encodings(module).transfers}
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, tvm.relax.Call) and binding.value.op.name == "relax.to_vdevice":
                # An encoded transfer has a variable of its own, named after the model's.
                name, ty = str(binding.var.name).removesuffix("_encoded"), binding.var.ty
                entry = encoded.get(name)
                shape = [sizes[str(extent)] for extent in ty.shape.values]
                layout = rh.encoding.PackedLayout.parse(entry.layout if entry else f"identity<{len(shape)}>")
                size = layout.storage_bytes(shape, str(ty.dtype))
                anew = entry.relayout if entry and entry.relayout else "no"
                device = device_name(ty.vdevice, vdevices_of(module))
                cells = (name, device, layout if entry else "row-major", size, anew)
                table.add_row(*(Text(str(cell)) for cell in cells))
    return table


@click.command(epilog="\b\n" + (__doc__ or "").partition("\n\n")[2])
@click.option("--m", default=2, show_default=True, type=click.IntRange(min=1), help="Rows of the left matrix.")
@click.option("--k", default=3, show_default=True, type=click.IntRange(min=1), help="Columns of the left matrix.")
@click.option("--n", default=5, show_default=True, type=click.IntRange(min=1), help="Columns of the right matrix.")
@click.option("--vdevice", multiple=True, help="A device; give two of them. [default: llvm and c]")
@click.option("--seed", default=0, show_default=True, help="Seed of the random matrices (sizes other than 2, 3, 5).")
@click.option("--smoke", is_flag=True, help="Default sizes, whatever is given: does the command work?")
@click.option("--ir", is_flag=True, help="Print the module after each pass, too.")
def main(m: int, k: int, n: int, vdevice: Sequence[str], seed: int, smoke: bool, ir: bool) -> None:
    """Multiply two matrices on two devices, add both products, and show the encodings on the way."""
    if smoke:
        m, k, n = 2, 3, 5
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=max(screen.width, 180))
    if vdevice and len(vdevice) != 2:
        raise click.UsageError(f"two --vdevice are needed, found {len(vdevice)}")
    devices = parse_vdevices(vdevice or default_devices(screen))
    sizes = {"m": m, "k": k, "n": n}

    module = rh.transform.UpdateVDevice(devices)(Product)
    passed = stages(module)
    if ir:
        for name, stage in passed.items():
            screen.rule(f"after {name}", align="left")
            screen.print(stage.script(), markup=False)
    before, after = (rh.transform.describe_encodings(passed[name]) for name in PASSES[-2:])
    screen.print(purposes_table(before))
    screen.print(layouts_table(after, sizes))
    screen.print(transfers_table(passed[PASSES[-1]], sizes))

    executable = rh.compile(module)
    for entry in executable.metadata.encodings["cancelled"]:
        screen.print(f"Cancelled on {entry['device']}: {entry['variable']}, {entry['reason']}", markup=False)

    lhs, rhs = inputs(m, k, n, seed)
    result = rh.vm.VirtualMachine(executable)["main"](lhs, rhs).numpy()
    expected = 2 * (lhs.astype("int64") @ rhs.astype("int64"))
    if result.size <= 100:
        screen.print(f"{result}", markup=False)
    if not np.array_equal(result, expected):
        wrong = int(np.sum(result != expected))
        raise rh.HeteroError(f"{wrong} of {result.size} results are wrong")
    screen.print(f"The same as exact integer arithmetic: {m}×{k} times {k}×{n}, on both devices, added.", markup=False)


def default_devices(screen: Console) -> tuple[str, str]:
    """This CPU and portable C; without a C compiler, the baseline of this CPU's architecture."""
    if tvm.support.cc.get_cc():
        return "llvm", "c"
    baseline = "x86-64-v2" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
    screen.print(f"There is no C compiler here: the second device is llvm {baseline}, not c.", markup=False)
    return "llvm", json.dumps({"kind": "llvm", "mcpu": baseline})


if __name__ == "__main__":
    try:
        main()
    except rh.HeteroError as error:
        sys.exit(f"error: {error}")
