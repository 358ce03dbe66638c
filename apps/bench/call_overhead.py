"""The cost of a call besides its kernel: one addition over 16 floats, by kind of argument.

python apps/bench/call_overhead.py
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import click
import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from smoke import smoke
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh

CALLS = 200


@I.ir_module
class Static:
    @R.function
    def main(x: R.Tensor((16,), "float32"), w: R.Tensor((16,), "float32")):
        with R.dataflow():
            y = R.add(x, w)
            R.output(y)
        return y


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 16), "float32"), w: R.Tensor((16,), "float32")):
        with R.dataflow():
            y = R.add(x, w)
            R.output(y)
        return y


def programs() -> dict[str, Callable[[], object]]:
    """The timed calls, by name."""
    calls: dict[str, Callable[[], object]] = {}
    for mod, shape in ((Static, (16,)), (Symbolic, (1, 16))):
        name = "static" if mod is Static else "symbolic"
        arrays = np.ones(shape, "float32"), np.ones(16, "float32")
        tensors = tuple(map(tvm.runtime.tensor, arrays))
        array, tensor = np.empty(shape, "float32"), tvm.runtime.empty(shape, "float32")
        main = rh.vm.VirtualMachine(rh.compile(mod))["main"]
        stock = tvm.relax.VirtualMachine(tvm.compile(mod, rh.native("llvm")), tvm.cpu())["main"]
        calls[f"{name}, tvm tensors"] = lambda f=main, t=tensors: f(*t)
        calls[f"{name}, tvm tensors, out="] = lambda f=main, t=tensors, out=tensor: f(*t, out=out)
        calls[f"{name}, numpy"] = lambda f=main, a=arrays: f(*a)
        calls[f"{name}, numpy, out="] = lambda f=main, a=arrays, out=array: f(*a, out=out)
        calls[f"{name}, numpy, by name"] = lambda f=main, a=arrays: f(x=a[0], w=a[1])
        calls[f"{name}, stock TVM, tvm tensors"] = lambda f=stock, t=tensors: f(*t)
    return calls


@click.command()
@click.option("--rounds", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(rounds=1)
def main(rounds: int, as_json: bool) -> None:
    """Time all calls in turns, so that the machine is alike for all; the median turn counts."""
    calls = programs()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    medians = {name: statistics.median(turns) for name, turns in times.items()}
    if as_json:
        click.echo(json.dumps(medians))
        return
    table = Table()
    table.add_column("call")
    table.add_column("µs", justify="right")
    for name, microseconds in medians.items():
        table.add_row(name, f"{microseconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
