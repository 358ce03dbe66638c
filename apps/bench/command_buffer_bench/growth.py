"""Memory that submissions leak: resident memory while a region gets new bindings each time."""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from bars import Check
from memory import resident

import relax_hetero as rh
from command_buffer_bench.chains import WIDTH, Chain, whole_numbers

GROWTH_BAR = 256.0  # KB over all counted submissions
# Number of results that are held, so that the next submission cannot get their addresses.
HELD = 64
# Share of submissions that fill pools and are not counted; number of readings of memory in the rest.
WARM_SHARE, SAMPLES = 0.2, 40
# Extents that a symbolic chain is called with.
EXTENTS = range(1, 257, 15)


def growth(submit: Callable[[int], None], submissions: int) -> float:
    """Growth of resident memory in KB from the first to the last quarter of its samples, warm-up excluded.

    Parameters
    ----------
    submit : callable
        Takes the number of the submission.
    submissions : int
    """
    warm = int(submissions * WARM_SHARE)
    every = max(1, (submissions - warm) // SAMPLES)
    samples = []
    gc.collect()
    gc.freeze()  # collections then visit only objects of submissions, not of imports
    try:
        for index in range(submissions):
            submit(index)
            if index >= warm and (index - warm) % every == 0:
                gc.collect()
                samples.append(resident("VmRSS"))
    finally:
        gc.unfreeze()
    quarter = max(1, len(samples) // 4)
    return (statistics.median(samples[-quarter:]) - statistics.median(samples[:quarter])) / 1024


def measure_memory(kernels: int, submissions: int) -> list[dict[str, Any]]:
    """A row for each kind of region: its growth, and the number of different addresses bound.

    Raises
    ------
    RuntimeError
        If a result is wrong.
    """
    rows = []
    for kind, chain in (("static", Chain(kernels)), ("symbolic", Chain(kernels, symbolic=True))):
        machine = rh.vm.VirtualMachine(rh.compile(chain.module(), command_buffers=True))
        arrays = [whole_numbers(extent, extent) for extent in EXTENTS] if chain.symbolic else [whole_numbers(0)]
        rows.append(_measure(f"{kernels} kernels, {kind} extent", chain, machine["main"], arrays, submissions))
        if not chain.symbolic:
            submit = _submission(chain.record(machine, WIDTH))
            rows.append(_measure(f"{kernels} kernels, recorded by hand", chain, submit, arrays, submissions))
    return rows


def _submission(buffer: rh.vm.CommandBuffer) -> Callable[[tvm.runtime.Tensor], tvm.runtime.Tensor]:
    def submit(argument: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        result = tvm.runtime.empty(argument.shape, "float32")
        buffer.submit([argument, result])
        return result

    return submit


def _measure(
    name: str,
    chain: Chain,
    run: Callable[[tvm.runtime.Tensor], tvm.runtime.Tensor],
    arrays: Sequence[np.ndarray],
    submissions: int,
) -> dict[str, Any]:
    expected = [chain.result(array) for array in arrays]
    live: deque[tvm.runtime.Tensor] = deque(maxlen=2 * HELD)
    addresses: set[tuple[int, int]] = set()

    def submit(index: int) -> None:
        case = index % len(arrays)
        argument = tvm.runtime.tensor(arrays[case])
        result = run(argument)
        live.extend((argument, result))
        if len(addresses) < HELD:
            addresses.add((argument.data_ptr(), result.data_ptr()))
        if not np.array_equal(result.numpy(), expected[case]):
            raise RuntimeError(f"submission {index} of {name}: wrong numbers")

    grown = growth(submit, submissions)
    return {"region": name, "submissions": submissions, "bindings": len(addresses), "grown_kb": grown}


def memory_checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The bars of the growth."""
    return [Check(f"{row['region']}: KB grown", row["grown_kb"], GROWTH_BAR, at_most=True) for row in rows]


def memory_table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells."""
    cells = [[row["region"], f"{row['submissions']:,}", f"{row['bindings']}", f"{row['grown_kb']:.0f}"] for row in rows]
    columns = ["region", "submissions", "different bindings (at least)", "KB grown"]
    return "resident memory over submissions with other bindings", columns, cells
