"""The time that donating a cache saves when one row of it is written, for each way to write the update."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh

# Float32 elements of a row of the cache: 16 KB.
COLUMNS = 4096


def scatter_nd(cache: relax.Expr, row: relax.Expr, place: relax.Expr) -> relax.Expr:
    """Write a row at one index."""
    return relax.op.scatter_nd(cache, relax.op.reshape(place, (1, 1)), row)


def scatter_elements(cache: relax.Expr, row: relax.Expr, place: relax.Expr) -> relax.Expr:
    """Write elements, each at its own index."""
    places = relax.op.broadcast_to(relax.op.reshape(place, (1, 1)), (1, COLUMNS))
    return relax.op.scatter_elements(cache, places, row, axis=0)


def add(cache: relax.Expr, row: relax.Expr, _place: relax.Expr) -> relax.Expr:
    """Read and write the whole cache: donating saves only the memory of the result."""
    return relax.op.add(cache, row)


UPDATES: dict[str, Callable[..., relax.Expr]] = {
    "scatter_nd": scatter_nd,
    "scatter_elements": scatter_elements,
    "add": add,
}


def module(update: Callable[..., relax.Expr], rows: int) -> tvm.IRModule:
    """A function that updates a cache of `rows` rows."""
    builder = relax.BlockBuilder()
    cache = relax.Var("cache", relax.TensorType([rows, COLUMNS], "float32"))
    row = relax.Var("row", relax.TensorType([1, COLUMNS], "float32"))
    place = relax.Var("place", relax.TensorType([1], "int64"))
    with builder.function("main", [cache, row, place]):
        with builder.dataflow():
            result = builder.emit_output(update(cache, row, place))
        builder.emit_func_output(result)
    return builder.get()


def measure(name: str, rows: int, seconds: float) -> dict[str, Any]:
    """Microseconds of a call whose cache is the last result, and true if both share memory.

    Raises
    ------
    RuntimeError
        If results differ.
    """
    rng = np.random.default_rng(0)
    cache, row = (rng.standard_normal((count, COLUMNS)).astype("float32") for count in (rows, 1))
    place = tvm.runtime.tensor(np.array([rows // 2]))
    row_of_table: dict[str, Any] = {"update": name, "MB": rows * COLUMNS * 4 / 2**20}
    results = []
    for kind, donate in (("kept", None), ("donated", ["cache"])):
        call = rh.vm.VirtualMachine(rh.compile(module(UPDATES[name], rows), donate=donate))["main"]
        argument = tvm.runtime.tensor(cache)
        now = call(argument, tvm.runtime.tensor(row), place)
        results.append(now.numpy())
        row_of_table[f"{kind} in place"] = now.data_ptr() == argument.data_ptr()
        row_of_table[f"{kind} us"] = round(_microseconds(call, now, tvm.runtime.tensor(row * 0), place, seconds), 1)
    if not np.array_equal(*results):
        raise RuntimeError(f"{name}: results differ")
    return row_of_table


def _microseconds(
    call: Callable[..., Any], cache: tvm.runtime.Tensor, row: tvm.runtime.Tensor, place: Any, seconds: float
) -> float:
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        cache = call(cache, row, place)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=COLUMNS, help="rows of the cache, 16 KB each (4096: 64 MB)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for each update")
    parser.add_argument("--update", choices=UPDATES, action="append", help="updates to measure (default: all)")
    parser.add_argument("--smoke", action="store_true", help="everything at its smallest: does the command work?")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rows, arguments.seconds = 2, 0.0
    for name in arguments.update or UPDATES:
        print(json.dumps(measure(name, arguments.rows, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
