"""The cost of command buffers at compile time: `rh.compile` and making a machine, each in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bars import Check

PROGRAM = Path(__file__).resolve().parents[1] / "command_buffers.py"
COMPILE_BAR = 1.3  # times without command buffers
# Prefix of the name of a chain; the number of its distinct small kernels follows.
CHAIN = "kernels:"


def compile_here(model: str, command_buffers: bool) -> dict[str, Any]:
    """Compile an ONNX file, or ``kernels:N``, and make its machine; seconds of both, and counts of regions.

    Imports, TVM's own start and the reading of the file are not counted.
    """
    import numpy as np
    import tvm

    import relax_hetero as rh
    from command_buffer_bench.chains import Chain, whole_numbers

    chain = Chain(int(model[len(CHAIN) :]), sys.maxsize, grows=True) if model.startswith(CHAIN) else None
    mod = chain.module() if chain else rh.from_onnx(model)
    rh.vm.VirtualMachine(rh.compile(Chain(2).module(), command_buffers=command_buffers, cache=False))
    begin = time.perf_counter()
    executable = rh.compile(mod, command_buffers=command_buffers, cache=False)
    compiled = time.perf_counter()
    machine = rh.vm.VirtualMachine(executable)
    end = time.perf_counter()
    if chain:
        array = whole_numbers(0)
        if not np.array_equal(machine["main"](tvm.runtime.tensor(array)).numpy(), chain.result(array)):
            raise SystemExit(f"{model}: wrong numbers")
    regions = executable.metadata.regions
    return {
        "compile": compiled - begin,
        "machine": end - compiled,
        "kernels": len(executable.metadata.dispatches),
        "regions": len(regions),
        "commands": sum(len(region.commands) for region in regions),
    }


def compile_apart(model: str, command_buffers: bool) -> dict[str, Any]:
    """Run `compile_here` in a process of its own; RuntimeError with its output if it fails."""
    command = [sys.executable, str(PROGRAM), "compile-here", model, *([] if command_buffers else ["--without"])]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{model}: status {process.returncode}: {process.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure_compile(name: str, model: str, rounds: int) -> dict[str, Any]:
    """Median seconds with and without command buffers, in turns, and the ratio of their sums."""
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for turn in range(rounds):
        for command_buffers in (True, False) if turn % 2 else (False, True):
            runs[command_buffers].append(compile_apart(model, command_buffers))
    row = {"model": name, **{key: runs[True][0][key] for key in ("kernels", "regions", "commands")}}
    for part in ("compile", "machine"):
        for command_buffers, suffix in ((True, "with"), (False, "without")):
            row[f"{part}_{suffix}"] = statistics.median(run[part] for run in runs[command_buffers])
    with_both, without_both = (
        statistics.median(run["compile"] + run["machine"] for run in runs[key]) for key in (True, False)
    )
    return {**row, "ratio": with_both / without_both}


def compile_checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The bars of the ratios."""
    return [Check(f"{row['model']}: times as long", row["ratio"], COMPILE_BAR, at_most=True) for row in rows]


def compile_table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells."""
    parts = ("compile_with", "compile_without", "machine_with", "machine_without")
    cells = [
        [
            row["model"],
            *(str(row[key]) for key in ("kernels", "regions", "commands")),
            *(f"{row[part]:.2f}" for part in parts),
            f"{row['ratio']:.3f}",
        ]
        for row in rows
    ]
    columns = ["model", "kernels", "regions", "commands", "compile", "without", "machine", "without", "ratio"]
    return "seconds to compile and to make the machine, with command buffers and without", columns, cells
