"""Peak memory of activations: planned, the lower bound of any plan for that order of kernels, and measured.

python apps/bench/memory_plan.py                      # MiniLM, ResNet-50 and three more
python apps/bench/memory_plan.py resnet50 path/to/model.onnx --dims batch=1,sequence=128 --json memory.json

*least* is the maximum of the bytes of tensors alive at one kernel, *planned* the bytes that a call takes from the pool,
both without inputs, weights and results. *taken* is measured on one thread in a fresh process that has loaded the
model: after a first call, which includes one-time work, the pool is emptied, and the peak of resident memory over the
next calls counts. ONNX Runtime frees its memory if its arena is off; the arena, which is on by default, cannot be
emptied, so with it the first call counts, one-time work included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from memory import Peak
from model_zoo import model_path, random_inputs
from rich.console import Console
from rich.table import Table
from smoke import SMALL_MODEL, smoke

MODELS = ("minilm", "resnet50", "squeezenet", "densenet121", "mobilenet_v2")
CALLS = 3
_TAKEN = {"taken": "ours", "onnxruntime": "no arena", "onnxruntime_arena": "arena"}
# Blocks above this size come from the system, so that none is in memory that loading has freed.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}


def peak(call: Callable[[], object]) -> int:
    """Peak of the resident bytes that calls add."""
    reached = Peak()
    for _ in range(CALLS):
        call()
    return reached.bytes()


def compiled(model: Path, library: Path, dims: Mapping[str, int]) -> dict[str, Any]:
    """Compile a model for this CPU; returns its plan."""
    import relax_hetero as rh

    exe = rh.compile(rh.from_onnx(model), cache=False)
    exe.export_library(library)
    plan = exe.memory_plan
    use = plan.at("main", **{name: dims.get(name, 1) for name in plan.symbolic_dims()})
    results = sum(memory.results for memory in use.devices)
    return {"least": use.lower_bound, "planned": use.transient, "results": results}


def ours(library: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Memory of calls of a compiled model."""
    import tvm_ffi

    import relax_hetero as rh

    vm = rh.vm.VirtualMachine(rh.load(library))
    vm["main"](**inputs)
    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()
    return {"taken": peak(lambda: vm["main"](**inputs))}


def onnxruntime(model: Path, inputs: Mapping[str, Any], arena: bool) -> dict[str, Any]:
    """Memory of calls in ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = arena
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    call = partial(session.run, None, dict(inputs))
    if not arena:
        call()
    return {"taken": peak(call)}


def alone(*words: object) -> dict[str, Any]:
    """Run `work` in a process of its own."""
    command = [sys.executable, __file__, "--alone", json.dumps([str(word) for word in words])]
    process = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if process.returncode:
        raise click.ClickException(f"{words[0]} failed:\n{process.stderr}")
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return figures


def work(contestant: str, model: str, library: str, dims: str) -> dict[str, Any]:
    """Measure one part of a row; `alone` runs this in a process."""
    if contestant == "compile":
        return compiled(Path(model), Path(library), json.loads(dims))
    inputs = random_inputs(Path(model), json.loads(dims), 0)
    if contestant == "ours":
        return ours(Path(library), inputs)
    return onnxruntime(Path(model), inputs, arena=contestant == "arena")


def measured(model: Path, dims: Mapping[str, int]) -> dict[str, Any]:
    """The row of a model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (model, Path(folder) / "model.so", json.dumps(dict(dims)))
        row = alone("compile", *arguments)
        peaks = {key: alone(contestant, *arguments)["taken"] for key, contestant in _TAKEN.items()}
        return {"model": model.stem, **row, **peaks}


def _dims(_context: click.Context, _parameter: click.Parameter, text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(",") if part)
    return {name: int(size) for name, size in pairs}


@click.command(context_settings={"max_content_width": 120})
@click.argument("models", nargs=-1)
@click.option("--dims", default="batch=1,sequence=128", callback=_dims, show_default=True, help="Symbolic dimensions.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="File to write the figures to.")
@click.option("--alone", "words", hidden=True)
@smoke(models=(SMALL_MODEL,), dims={})
def main(models: tuple[str, ...], dims: dict[str, int], file: Path | None, words: str | None) -> None:
    """Compare the planned and measured peak memory of activations of MODELS with ONNX Runtime's."""
    if words is not None:
        click.echo(json.dumps(work(*json.loads(words))))
        return
    rows = [measured(model_path(name), dims) for name in models or MODELS]
    if file is not None:
        file.write_text(json.dumps(rows, indent=1))
    head = ("least", "planned", "ratio", "results", "taken", "ratio", "ONNX Runtime takes", "ratio", "with its arena")
    table = Table("model", *head, title="Activations, bytes; ratios are to the least", title_justify="left")
    for row in rows:
        planned, taken, peer = (f"{row[key] / row['least']:.3f}" for key in ("planned", "taken", "onnxruntime"))
        numbers = {key: f"{value:,}" for key, value in row.items() if isinstance(value, int)}
        ours = (numbers["least"], numbers["planned"], planned, numbers["results"], numbers["taken"], taken)
        table.add_row(row["model"], *ours, numbers["onnxruntime"], peer, numbers["onnxruntime_arena"])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
