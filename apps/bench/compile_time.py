"""Where compile time goes: this library's passes, TVM's, code generation; and how placement scales.

python apps/bench/compile_time.py                          # ResNet-50 from the onnx package, cut over two CPU targets
python apps/bench/compile_time.py model.onnx --bindings 1000 --bindings 10000
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time

import click
import onnx
import tvm
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tvm import relax

import relax_hetero as rh
from relax_hetero import transform

OURS = frozenset([*transform.__all__, "relax_hetero"])
RESNET = pathlib.Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"


@tvm.ir.instrument.pass_instrument
class SelfTimes:
    """Seconds by pass name, those of nested passes taken off."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open: list[list[float]] = []

    def run_before_pass(self, _mod: tvm.IRModule, _info: tvm.transform.PassInfo) -> None:
        self.open.append([time.perf_counter(), 0.0])

    def run_after_pass(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        start, nested = self.open.pop()
        total = time.perf_counter() - start
        self.seconds[info.name] = self.seconds.get(info.name, 0.0) + total - nested
        if self.open:
            self.open[-1][1] += total


def measure_compile(model: str, rounds: int) -> dict[str, object]:
    """Median share of this library's passes in `rh.compile`, and the seconds of one round."""
    vdevices = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}]
    mod = rh.from_onnx(model, vdevices=vdevices, placement={"*Conv*": "llvm:0", "*": "llvm:1"})
    shares, runs = [], []
    for _ in track(range(rounds), "compiling", console=Console(stderr=True), transient=True):
        times = SelfTimes()
        start = time.perf_counter()
        with tvm.transform.PassContext(instruments=[times]):
            rh.compile(mod)
        total = time.perf_counter() - start
        ours = {name: s for name, s in times.seconds.items() if name in OURS}
        shares.append(sum(ours.values()) / total)
        runs.append({"total": total, "stock passes": sum(times.seconds.values()) - sum(ours.values()), **ours})
    return {"share": statistics.median(shares), "seconds": runs[-1]}


def measure_placement(bindings: int) -> float:
    """Seconds that RealizeVDevice takes for a chain of so many bindings with a hint at its end."""
    builder = relax.BlockBuilder()
    devices = [rh.VDevice("llvm", 0), rh.VDevice("llvm", 1)]
    x = relax.Var("x", relax.TensorType((16,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(bindings):
                value = builder.emit(relax.op.add(value, x))
            out = builder.emit_output(relax.op.hint_on_device(value, tvm.cpu(1)))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", devices)
    start = time.perf_counter()
    transform.RealizeVDevice()(mod)
    return time.perf_counter() - start


@click.command()
@click.argument("model", default=str(RESNET))
@click.option("--rounds", default=5, show_default=True)
@click.option("--bindings", multiple=True, type=int, default=(1000, 10000), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(model: str, rounds: int, bindings: tuple[int, ...], as_json: bool) -> None:
    compiled = measure_compile(model, rounds)
    placed = {count: measure_placement(count) for count in bindings}
    if as_json:
        click.echo(json.dumps({"compile": compiled, "placement": placed}))
        return
    print(f"{pathlib.Path(model).name}: this library's passes take {compiled['share']:.1%} of compile time")
    table = Table()
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for part, seconds in compiled["seconds"].items():
        table.add_row(part, f"{seconds:.3f}")
    for count, seconds in placed.items():
        table.add_row(f"RealizeVDevice, chain of {count:,} bindings", f"{seconds:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
