"""The time that the compile cache saves: a model compiled without it, with a miss, and with a hit.

python apps/bench/compile_cache.py bert resnet50
python apps/bench/compile_cache.py bert --vdevice cuda              # needs a CUDA compiler, and no GPU
python apps/bench/compile_cache.py model.onnx --rounds 5 --json
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import click
from model_zoo import model_path
from rich.console import Console
from rich.progress import track
from rich.table import Table
from smoke import SMALL_MODEL, smoke

STEPS = {"without": "compiled", "miss": "compiled and kept", "hit": "found"}


def compile_once(model: str, folder: str, vdevice: str) -> dict[str, object]:
    """Import and compile a model for a device in this process; an empty folder means no cache."""
    import relax_hetero as rh

    assert rh.compile and rh.from_onnx  # imports their modules
    start = time.perf_counter()
    mod = rh.from_onnx(model, [vdevice])
    imported = time.perf_counter()
    exe = rh.compile(mod, cache=folder or False)
    return {"import": imported - start, "compile": time.perf_counter() - imported, "state": exe.metadata.cache.state}


def in_its_own_process(model: str, folder: str, vdevice: str) -> dict[str, object]:
    """Run `compile_once` in a fresh process."""
    command = [sys.executable, __file__, "--once", folder, "--vdevice", vdevice, model]
    environment = {name: value for name, value in os.environ.items() if name != "RELAX_HETERO_CACHE"}  # may be "off"
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(model: str, rounds: int, vdevice: str) -> dict[str, float]:
    """Median seconds of the import, and of each of `STEPS`."""
    times: dict[str, list[float]] = {"import": [], **{step: [] for step in STEPS}}
    for _ in track(range(rounds), pathlib.Path(model).name, console=Console(stderr=True), transient=True):
        with tempfile.TemporaryDirectory() as folder:
            for step in STEPS:
                result = in_its_own_process(model, "" if step == "without" else folder, vdevice)
                assert result["state"] == (step if step != "without" else "unused"), result
                times["import"].append(float(str(result["import"])))
                times[step].append(float(str(result["compile"])))
    return {step: statistics.median(seconds) for step, seconds in times.items()}


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--vdevice", default="llvm", show_default=True, help="The device to compile for.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--once", metavar="FOLDER", hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(models=(SMALL_MODEL,), rounds=1)
def main(models: tuple[str, ...], vdevice: str, rounds: int, once: str | None, as_json: bool) -> None:
    if once is not None:
        click.echo(json.dumps(compile_once(models[0], once, vdevice)))
        return
    measured = {name: measure(str(model_path(name)), rounds, vdevice) for name in models}
    if as_json:
        click.echo(json.dumps(measured))
        return
    table = Table(title="rh.compile, seconds; importing the ONNX file comes before", title_justify="left")
    for column in ("model", *STEPS.values(), "importing"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, seconds in measured.items():
        table.add_row(name, *(f"{seconds[step]:.2f}" for step in (*STEPS, "import")))
    Console().print(table)


if __name__ == "__main__":
    main()
