"""Whole models on an NVIDIA GPU, and cut over the GPU and a CPU or a second GPU: errors against a CPU, and times.

python apps/bench/gpu_models.py                                       # every model of the zoo, and the newer ones
python apps/bench/gpu_models.py bert gpt2 swin --precision float16 --torch
python apps/bench/gpu_models.py bert --gpu llvm                       # a CPU stands for the GPU: does the command work?
python apps/bench/gpu_models.py --build-only --gpu '{"kind": "cuda", "arch": "sm_90a"}'    # where there is no GPU

Models are compiled and compared side by side, in a process each, and timed one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from bars import Check, geometric_mean, verdict
from gpu_bench.model_process import Job
from model_bench.dispatches import COLUMNS, Dispatch, Roof, dispatch_cells
from model_zoo import BY_NAME, MAKERS, model_path
from model_zoo.newer import NEWER
from model_zoo.skeleton import SUFFIX
from rich.console import Console
from rich.table import Table
from smoke import SMALL_MODEL, smoke

ALLOWED = {"float32": 1e-3, "tfloat32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest allowed error relative to an output's largest number, by precision."""
LEFT_OUT = ("inception_v2", "bvlc_alexnet", "zfnet512")
"""Models of the zoo that a run without names leaves out, because they resemble others."""

SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Element types with a measured peak of products, by their names in profiles."""

PEERS = ("torch", "torch.compile")
"""Steps that time other libraries."""

Line = dict[str, Any]


class Process:
    """A model's process, which a thread of its own writes to and reads from."""

    def __init__(self, job: Job, report: Callable[[Line], None], limit: float) -> None:
        self.job, self._report, self._limit = job, report, limit
        self._process: subprocess.Popen[str] | None = None
        self._log: Any = None

    def build(self) -> bool:
        """Compile and compare; true if the process is ready to be timed."""
        import tempfile

        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self.job.command(), env=self.job.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip
        return self._read(until="waits")

    def finish(self, with_times: bool) -> None:
        """Time the model, or end the process."""
        assert self._process is not None and self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write("time\n" if with_times else "\n")
            self._process.stdin.flush()
            self._read(until="")

    def _read(self, until: str) -> bool:
        assert self._process is not None and self._process.stdout is not None
        process, begun = self._process, "start"
        timer = threading.Timer(self._limit, process.kill)
        timer.start()
        try:
            for text in process.stdout:
                line = json.loads(text)
                if until and until in line:
                    return True
                if "begins" in line:
                    begun = line["begins"]
                else:
                    self._report(line)
        finally:
            timer.cancel()
        if process.wait():
            self._log.seek(0)
            last = self._log.read()[-400:].decode(errors="replace").strip()
            failure = f"the process ended with status {process.returncode}: {last}"
            self._report({"step": begun, **self.job.about, "failure": failure})
        return False


def run(jobs: Sequence[Job], workers: int, limit: float, with_times: bool, report: Callable[[Line], None]) -> None:
    """Build all models in `workers` processes, then time them one by one."""
    places, lock = threading.Semaphore(workers), threading.Lock()
    built: list[Process] = []

    def say(line: Line) -> None:
        with lock:
            report(line)

    def build(process: Process) -> None:
        with places:
            if process.build():
                with lock:
                    built.append(process)

    threads = [threading.Thread(target=build, args=(Process(job, say, limit),)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in built:
        process.finish(with_times)


def _file_of(name: str, skeletons: Path | None) -> str:
    bare = skeletons / f"{name}{SUFFIX}" if skeletons else None
    return str(bare if bare and bare.exists() else name if name.endswith(SUFFIX) else model_path(name))


@click.command()
@click.argument("models", nargs=-1)
@click.option("--precision", default="float32", show_default=True, help="Precisions of float products, a list.")
@click.option("--gpu", default="cuda", show_default=True, help="Target of the GPU; llvm: a CPU in its place.")
@click.option("--cuts", default=6, show_default=True, help="Number of parts of the cut over two devices; 0 for none.")
@click.option("--other", default="llvm", show_default=True, help="Second device of the cut; cuda:1 is a second GPU.")
@click.option("--workers", default=os.cpu_count() or 1, show_default=True, help="Models compiled at a time.")
@click.option("--limit", default=300.0, show_default=True, help="Time limit of a model.")
@click.option("--reference", default="onnxruntime", show_default=True, type=click.Choice(["onnxruntime", "ours"]))
@click.option("--build-only", is_flag=True, help="Compile the models and run nothing; needs no GPU.")
@click.option("--no-times", is_flag=True, help="Compare only.")
@click.option("--torch", "peer", is_flag=True, help="Also time PyTorch's eager ops in a CUDA graph.")
@click.option("--compiled", default="", help="Also time torch.compile in this mode, in a CUDA graph; takes minutes.")
@click.option("--batch", default="1", show_default=True, help="Numbers of images or sentences, a list.")
@click.option("--slowest", default=0, help="Number of slowest kernels to list, with shares of peaks.")
@click.option(
    "--skeletons", type=click.Path(path_type=Path), help=f"A folder of NAME{SUFFIX} files to take models from."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Append JSON lines to this file.")
@smoke(models=(SMALL_MODEL,), peer=False, compiled="", batch="1", slowest=1)
def main(
    models: tuple[str, ...],
    precision: str,
    gpu: str,
    cuts: int,
    other: str,
    workers: int,
    limit: float,
    reference: str,
    build_only: bool,
    no_times: bool,
    peer: bool,
    compiled: str,
    batch: str,
    slowest: int,
    skeletons: Path | None,
    json_file: Path | None,
) -> None:
    """Compare MODELS (names of the zoo, ONNX files or skeletons; all by default) with a CPU, and time them."""
    names = models or tuple(name for name in (*MAKERS, *NEWER) if name not in LEFT_OUT)
    unknown = [name for name in names if name not in BY_NAME and not Path(name).exists() and "." not in name]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: neither files nor of {', '.join(BY_NAME)}")
    jobs = [
        Job(
            Path(name).name.partition(".")[0],
            _file_of(name, skeletons),
            kind,
            gpu,
            reference,
            cuts,
            other,
            build_only,
            peer,
            compiled,
            int(size),
            slowest,
        )
        for kind in precision.split(",")
        for size in batch.split(",")
        for name in names
    ]
    lines: list[Line] = []
    begin = time.monotonic()

    def report(line: Line) -> None:
        lines.append({**line, "at": round(time.monotonic() - begin, 1)})
        if json_file:
            with json_file.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")

    run(jobs, workers, limit, not (no_times or build_only), report)
    _print(lines)
    if any("failure" in line for line in lines if line["step"] not in PEERS) or not all(
        c.passed for c in checks(lines)
    ):
        raise SystemExit(1)


def checks(lines: Sequence[Line]) -> list[Check]:
    """Every measured error and the largest allowed."""
    return [
        Check(f"{_title(line)}: error", line["error"], bar, at_most=True)
        for line in lines
        if "error" in line and line["step"] not in PEERS
        for bar in [ALLOWED[line["precision"]]]
    ]


def _print(lines: Sequence[Line]) -> None:
    console = Console(highlight=False, width=180)
    table = Table(title="errors are of an output's largest number; milliseconds are of a call", title_justify="left")
    for column in (
        "model",
        "precision",
        "batch",
        "error",
        "cut",
        "compiled, s",
        "numpy to numpy",
        "on the GPU",
        "torch",
        "torch.compile",
        "ratio",
    ):
        table.add_column(column, justify="left" if column in ("model", "precision") else "right")
    ratios = []
    for key in dict.fromkeys(_job_of(line) for line in lines):
        steps = {line["step"]: line for line in lines if _job_of(line) == key}
        ours, eager, best = (steps.get(step, {}).get("device_ms") for step in ("times", "torch", "torch.compile"))
        theirs = min(filter(None, (eager, best)), default=None)
        ratios += [theirs / ours] if ours and theirs else []
        cells = [_error(steps.get("gpu", {})), _error(steps.get("cut", {}))]
        cells += [f"{steps.get('gpu', {}).get('compile_seconds', float('nan')):.1f}"]
        cells += [
            f"{value:.3f}" if value else "" for value in (steps.get("times", {}).get("call_ms"), ours, eager, best)
        ]
        table.add_row(*map(str, key), *cells, f"{ratios[-1]:.2f}" if ours and theirs else "")
    console.print(table)
    if ratios:
        console.print(f"geometric mean of the better torch's time over ours: {geometric_mean(ratios):.2f}")
    for line in lines:
        if "failure" in line:
            text = f"{_title(line)}: {line['failure'][:600]} {line.get('where', '')}"
            console.print(text, markup=False, soft_wrap=True)
        if "dispatches" in line:
            console.print(_kernels(line))
    for check in checks(lines):
        if not check.passed:
            console.print(f"{verdict(check)}: {check}", markup=False)


def _kernels(line: Line) -> Table:
    """The slowest kernels of a model, with shares of the device's measured peaks."""
    peaks, bandwidth = line["peaks"], line["bandwidth"] or float("inf")
    peak_texts = ", ".join(f"{dtype} {peak / 1e12:.1f}" for dtype, peak in peaks.items())
    title = f"{_title(line)}, with launches; peaks: {peak_texts} TFLOP/s, {bandwidth / 1e9:.0f} GB/s"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("dispatch", "precision", "bound by") else "right")
    for row in line["dispatches"]:
        dispatch = Dispatch(**row)
        roof = Roof(peaks.get(SHORT.get(dispatch.precision, ""), float("inf")), bandwidth)
        table.add_row(*dispatch_cells(dispatch, roof))
    return table


def _job_of(line: Line) -> tuple[str, str, int]:
    return line["model"], line["precision"], line["batch"]


def _title(line: Line) -> str:
    several = f", {line['batch']} at a time" if line["batch"] > 1 else ""
    return f"{line['model']} in {line['precision']}{several}, {line['step']}"


def _error(line: Line) -> str:
    return f"{line['error']:.1e}" if "error" in line else "failed" if "failure" in line else ""


if __name__ == "__main__":
    main()
