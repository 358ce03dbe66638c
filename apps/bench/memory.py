"""Memory of a model while it is compiled, loaded and run, each in a process of its own.

python apps/bench/memory.py                                # 16 linear layers of 4096 x 4096: 1 GB of float32 weights
python apps/bench/memory.py --layers 4 --width 1024 model.onnx

Peaks are resident memory above that after the imports; mapped pages of the file count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import click
from smoke import smoke

BATCH = 8


def resident(field: str) -> int:
    """A field of this process's status in bytes: ``VmRSS`` (now) or ``VmHWM`` (peak)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


class Peak:
    """Peak of resident memory above that at the beginning; the peak of the imports is reset."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
        self.before = resident("VmRSS")

    def bytes(self) -> int:
        return max(0, resident("VmHWM") - self.before)


def linear_stack(layers: int, width: int) -> Any:
    """A chain of ``relu(x @ w + b)``, each layer with its own weights."""
    import numpy as np
    import tvm
    from tvm import relax

    random = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((BATCH, width), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(layers):
                weight = random.random((width, width), dtype="float32")
                weight -= 0.5
                weight *= 4 / width**0.5
                constant = relax.const(tvm.runtime.tensor(weight))
                bias = relax.const(tvm.runtime.tensor(random.random(width, dtype="float32")))
                del weight  # only one layer's weight is held twice
                value = builder.emit(relax.op.nn.relu(relax.op.add(relax.op.matmul(value, constant), bias)))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def weight_bytes(mod: Any) -> int:
    """Bytes of a module's distinct constants."""
    import tvm
    from tvm_ffi import structural_walk

    sizes: dict[int, int] = {}

    def on_constant(constant: tvm.ir.GenericConst) -> None:
        if isinstance(constant.value, tvm.runtime.Tensor):
            data = constant.value
            sizes[data.data_ptr()] = int(data.numel()) * int(data.dtype.bits) // 8

    for func in mod.functions.values():
        structural_walk(func, (tvm.ir.GenericConst, on_constant))
    return sum(sizes.values())


def inputs_of(mod: Any) -> list[tuple[list[int], str]]:
    """Shape and element type of each input of ``main``."""
    return [([int(d) for d in p.ty.shape.values], str(p.ty.dtype.dtype)) for p in mod["main"].params]


def compile_here(engine: str, model: str, layers: int, width: int, file: str) -> dict[str, Any]:
    """Import or build a model, compile and export it; the peak covers all of this."""
    import onnx
    import tvm

    import relax_hetero as rh

    import_model = rh.from_onnx
    peak = Peak()
    mod = import_model(onnx.load(model)) if model else linear_stack(layers, width)
    facts = {"weights": weight_bytes(mod), "inputs": inputs_of(mod)}
    start = time.perf_counter()
    if engine == "relax_hetero":
        executable = rh.compile(mod, cache=False)
    else:
        executable = tvm.compile(mod, rh.native("llvm"))
    seconds = time.perf_counter() - start
    del mod
    compiling = peak.bytes()
    executable.export_library(file)
    return {**facts, "seconds": seconds, "compiling": compiling, "exporting": peak.bytes()}


def run_here(engine: str, inputs: list[tuple[list[int], str]], file: str) -> dict[str, Any]:
    """Load a file and call the model twice."""
    import numpy as np
    import tvm

    if engine == "relax_hetero":
        import relax_hetero as rh

        load, make = rh.load, rh.vm.VirtualMachine
    else:
        from tvm import relax

        load, make = tvm.runtime.load_module, lambda code: relax.VirtualMachine(code, tvm.cpu())
    random = np.random.default_rng(0)
    arrays = [
        random.random(shape, dtype) if dtype.startswith("float") else random.integers(0, 2, shape, dtype)
        for shape, dtype in inputs
    ]
    peak = Peak()
    machine = make(load(file))
    loaded = peak.bytes()
    for _ in range(2):
        results = machine["main"](*map(tvm.runtime.tensor, arrays))
    fields = [results] if isinstance(results, tvm.runtime.Tensor) else list(results)
    finite = all(np.isfinite(field.numpy()).all() for field in fields)
    return {"loading": loaded, "running": peak.bytes(), "after": resident("VmRSS") - peak.before, "finite": finite}


def child(function: str, *args: Any) -> dict[str, Any]:
    """Run a function of this file in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps([function, *args])]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(engine: str, model: str, layers: int, width: int) -> dict[str, Any]:
    """All figures of one engine: bytes, and seconds of compilation."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder) / "model.so")
        compiled = child("compile_here", engine, model, layers, width, file)
        exported = pathlib.Path(file).stat().st_size
        return {
            "engine": engine,
            **compiled,
            "exported": exported,
            **child("run_here", engine, compiled["inputs"], file),
        }


@click.command()
@click.argument("model", default="")
@click.option("--layers", default=16, show_default=True)
@click.option("--width", default=4096, show_default=True)
@click.option("--engine", "engines", multiple=True, default=("relax_hetero", "tvm"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--child", "request", hidden=True)
@smoke(model="", layers=1, width=64)
def main(model: str, layers: int, width: int, engines: tuple[str, ...], as_json: bool, request: str | None) -> None:
    """Measure MODEL (an ONNX file), or a stack of linear layers."""
    if request is not None:
        function, *args = json.loads(request)
        click.echo(json.dumps({"compile_here": compile_here, "run_here": run_here}[function](*args)))
        return
    rows = [measure(engine, model, layers, width) for engine in engines]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    name = pathlib.Path(model).name if model else f"{layers} linear layers of {width} x {width}"
    table = Table(title=f"{name}: {rows[0]['weights'] / 1e6:.1f} MB of weights; all as multiples of that")
    columns = ("exported", "loading", "running", "after", "compiling", "exporting")
    for column in ("engine", *columns, "seconds"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        cells = (f"{row[column] / row['weights']:.2f}" for column in columns)
        table.add_row(row["engine"], *cells, f"{row['seconds']:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
