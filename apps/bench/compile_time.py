"""Parts of compile time: this library's passes, TVM's, code generation; scaling of placement and of deep models.

python apps/bench/compile_time.py                          # ResNet-50 from the onnx package, cut over two CPU targets
python apps/bench/compile_time.py model.onnx --bindings 1000 --bindings 10000
python apps/bench/compile_time.py --chains                 # deep and wide models of every kind: seconds by their size
python apps/bench/compile_time.py --chains --kind softmaxes --kind "ONNX calls" --nodes 1000 --nodes 4000
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import click
import onnx
import tvm
from depth_bench import onnx_chains, relax_chains
from rich.console import Console
from rich.progress import track
from rich.table import Table
from smoke import SMALL_MODEL, smoke
from tvm import relax

import relax_hetero as rh
from relax_hetero import transform

KINDS = (*relax_chains.KINDS, *onnx_chains.KINDS)
OURS = frozenset([*transform.__all__, "relax_hetero"])
RESNET = pathlib.Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"


@tvm.ir.instrument.pass_instrument
class SelfTimes:
    """Seconds by pass name, without those of nested passes."""

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
    """Seconds that RealizeVDevice takes for a chain of bindings with a hint at its end."""
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


def measure_chain(kind: str, nodes: int) -> dict[str, float]:
    """Processor seconds of this process to import a chain (ONNX only) and to compile it."""
    model = onnx_chains.KINDS[kind](nodes) if kind in onnx_chains.KINDS else relax_chains.KINDS[kind](nodes)
    start = time.process_time()
    mod = rh.from_onnx(model) if kind in onnx_chains.KINDS else model
    imported = time.process_time()
    rh.compile(mod, cache=False)
    return {"import": imported - start, "compile": time.process_time() - imported}


def chain_in_a_process(kind: str, nodes: int, limit: float) -> dict[str, object]:
    """Run `measure_chain` in a process of its own; ``{"fails": reason}`` if it crashes, raises or takes too long."""
    command = [sys.executable, __file__, "--one", kind, "--nodes", str(nodes)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"fails": f"over {limit:g} s"}
    if process.returncode:
        stderr = process.stderr.strip().splitlines()
        return {"fails": stderr[-1] if stderr and process.returncode > 0 else f"status {process.returncode}"}
    seconds: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return seconds


def growth_exponent(first: tuple[int, float], last: tuple[int, float]) -> float:
    """The exponent with which the time grows between two sizes: 1 is linear, 2 quadratic."""
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def chain_table(kinds: Sequence[str], sizes: Sequence[int], limit: float) -> tuple[Table, dict[str, dict[int, object]]]:
    """A table of each kind at each size."""
    table = Table("chain")
    for size in sizes:
        table.add_column(f"{size:,} nodes: s", justify="right")
        table.add_column("ms a node", justify="right")
    table.add_column("exponent", justify="right")
    results: dict[str, dict[int, object]] = {}
    for kind in track(kinds, "compiling", console=Console(stderr=True), transient=True):
        row, times = [kind], []
        results[kind] = {}
        for size in sizes:
            result = results[kind][size] = chain_in_a_process(kind, size, limit)
            if "fails" in result:
                row += [str(result["fails"])[:60], ""]
                continue
            seconds = sum(float(str(part)) for part in result.values())
            times.append((size, seconds))
            row += [f"{seconds:.2f}", f"{seconds / size * 1e3:.2f}"]
        table.add_row(*row, f"{growth_exponent(*times[-2:]):.2f}" if len(times) > 1 else "")
    return table, results


@click.command()
@click.argument("model", default=str(RESNET))
@click.option("--rounds", default=5, show_default=True)
@click.option("--bindings", multiple=True, type=int, default=(1000, 10000), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--chains", is_flag=True, help="Compile deep and wide models instead, each in its own process.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Kinds of chains; all by default.")
@click.option("--nodes", multiple=True, type=int, default=(100, 1000, 10000), show_default=True, help="Their sizes.")
@click.option("--limit", default=600.0, show_default=True, help="Time limit of a chain, in seconds.")
@click.option("--one", hidden=True, help="Compile a chain in this process.")
@smoke(model=SMALL_MODEL, rounds=1, bindings=(10,), nodes=(8, 16), kinds=lambda kinds: kinds or KINDS[:1])
def main(
    model: str,
    rounds: int,
    bindings: tuple[int, ...],
    as_json: bool,
    chains: bool,
    kinds: tuple[str, ...],
    nodes: tuple[int, ...],
    limit: float,
    one: str | None,
) -> None:
    if one is not None:
        rh.compile(relax_chains.KINDS[KINDS[0]](2), cache=False)  # one-time work of the process is not counted
        click.echo(json.dumps(measure_chain(one, nodes[0])))
        return
    if chains:
        table, results = chain_table(kinds or KINDS, nodes, limit)
        if as_json:
            click.echo(json.dumps(results))
        else:
            Console(width=200).print(table)
        return
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
