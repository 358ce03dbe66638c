"""``relax-hetero bench``: times of a model here, in stock TVM and in ONNX Runtime, measured in the same run."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..display.console import console, print_json, print_table
from ..display.text import plural
from ..errors import HeteroError
from ..system import allowed_cpus
from .command import INPUT_FILE, OUTPUT, OUTPUT_FILE, cache_option, command, json_option, refuse_overwriting
from .models import Model
from .onnxruntime_reference import reference
from .placement_options import PlacementOptions, placement_options
from .run import flatten

if TYPE_CHECKING:
    from ..vm.file.executable import Executable

REFERENCE = "ONNX Runtime"
OURS = "relax-hetero"
WARM_UP_BELOW_SECONDS = 1.0  # programs with faster calls get an untimed call before each timed one
MIN_CALLS = 2  # minimum number of timed calls of a program, however slow

Call = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
"""A function from inputs by ONNX name to outputs in the model's order."""


@dataclass(frozen=True)
class Engine:
    """A program that runs the model.

    Attributes
    ----------
    name : str
        Name in the table.
    make : callable
        Function that compiles the model and returns the call; may raise anything.
    """

    name: str
    make: Callable[[], Call]


def this_library(model: Model) -> Engine:
    """Make the engine of this library, for a compiled model."""

    def make() -> Call:
        import relax_hetero as rh

        machine = rh.vm.VirtualMachine(model.executable)

        def call(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return [tensor.numpy() for tensor in flatten(machine["main"](*inputs.values()))]

        return call

    return Engine(OURS, make)


def stock_tvm(path: Path, shapes: Mapping[str, list[int]]) -> Engine:
    """Make the engine of stock TVM: ``from_onnx`` and ``tvm.compile`` with the default pipeline for this CPU."""

    def make() -> Call:
        import onnx
        import tvm
        from tvm.relax.frontend.onnx import from_onnx

        from ..target.native_target import native

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = from_onnx(onnx.load(str(path)), shape_dict=dict(shapes) or None, keep_params_in_input=False)
        names = [parameter.name for parameter in module["main"].params]
        machine = tvm.relax.VirtualMachine(tvm.compile(module, native("llvm")), tvm.cpu())

        def call(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            arguments = [tvm.runtime.tensor(array) for array in _by_position(inputs, names)]
            return [tensor.numpy() for tensor in flatten(machine["main"](*arguments))]

        return call

    return Engine("stock TVM", make)


def onnx_runtime(path: Path, threads: int) -> Engine:
    """Make the engine of ONNX Runtime's CPU provider."""

    def make() -> Call:
        run = reference(path, threads)
        return lambda inputs: list(run(inputs).values())

    return Engine(REFERENCE, make)


def _by_position(inputs: Mapping[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    # Stock TVM rewrites names that are not identifiers, but keeps the order.
    return [inputs[name] for name in names] if set(names) == set(inputs) else list(inputs.values())


@dataclass
class Timing:
    """Timed calls of one program, in seconds; `spent` includes untimed calls."""

    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0

    @property
    def median(self) -> float:
        """Median time of a call; NaN without calls."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def fastest(self) -> float:
        """Time of the fastest call; NaN without calls."""
        return min(self.seconds, default=float("nan"))


def interleave(
    calls: Mapping[str, Callable[[], object]],  # programs by name
    rounds: int,  # number of timed calls of each program
    budget: float,  # seconds after which a program skips the remaining rounds, once it has `MIN_CALLS` timed calls
    # Called with the program's name after each of its rounds, also skipped ones.
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time every program once per round, so that other load on the machine affects all alike."""
    timings = {name: Timing() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timing = timings[name]
            if timing.spent < budget or len(timing.seconds) < MIN_CALLS:
                _time_call(call, timing)
            advance(name)
    return timings


def _time_call(call: Callable[[], object], timing: Timing) -> None:
    begin = time.perf_counter()
    # Other programs have evicted the caches and stopped the threads of this one.
    if not timing.seconds or timing.fastest < WARM_UP_BELOW_SECONDS:
        call()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    timing.seconds.append(end - start)
    timing.spent += end - begin


@dataclass(frozen=True)
class TracedCalls:
    """Traced calls."""

    path: Path  # file with the trace
    calls: int  # number of calls
    seconds: float  # time from the first submission to the last result
    busy: dict[str, float]  # fraction of that time in which each queue worked

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        rate = self.calls / self.seconds
        return {"path": str(self.path), "calls": self.calls, "calls_per_second": rate, "busy": self.busy}

    def print(self) -> None:
        """Print a summary."""
        shares = ", ".join(f"{queue} {share:.0%} busy" for queue, share in self.busy.items())
        rate = self.calls / self.seconds
        stdout = console()
        stdout.print(f"{plural(self.calls, 'call')} submitted: {rate:.1f} per second; {shares}.", markup=False)
        stdout.print(f"Wrote {self.path}, for https://ui.perfetto.dev.", markup=False)


def trace_calls(executable: Executable, inputs: Mapping[str, np.ndarray], calls: int, path: Path) -> TracedCalls:
    """Submit calls of ``main`` on the same inputs, and write their trace.

    `path`: file to write; replaced if it exists.
    """
    from ..vm.machine import VirtualMachine

    machine = VirtualMachine(executable)
    machine.submit("main", *inputs.values()).result()  # warm-up: threads start, memory is allocated
    begin = time.perf_counter()
    with machine.trace(limit=calls) as trace:
        for _ in range(calls):
            machine.submit("main", *inputs.values())
    seconds = time.perf_counter() - begin
    trace.save(path)
    return TracedCalls(path, calls, seconds, trace.busy())


@command("bench")
@click.argument("model", type=INPUT_FILE)
@click.option("--rounds", type=click.IntRange(min=1), default=20, help="Number of timed calls of each engine.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of threads of each engine; the default is the number of cores.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    default=30.0,
    help="Number of seconds after which a slow engine skips the remaining rounds.",
)
@click.option("--stock/--no-stock", default=True, help="Time stock TVM, too, or leave it out.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random inputs.")
@click.option(
    "--trace",
    type=OUTPUT_FILE,
    metavar="OUT.json",
    help="Also submit calls, and write which work each queue did when, as a trace for Perfetto and Chrome.",
)
@click.option("--calls", type=click.IntRange(min=1), default=16, help="Number of submitted calls in the trace.")
@click.option(
    "--onnx",
    type=INPUT_FILE,
    metavar="MODEL.onnx",
    help="ONNX file that a library was compiled from; the other engines run it.",
)
@click.option("--html", type=OUTPUT, metavar="FILE", help="Also measure each kernel, and write a report for a browser.")
@placement_options
@cache_option
@json_option
def bench_command(
    model: Path,
    rounds: int,
    threads: int | None,
    budget: float,
    stock: bool,
    seed: int,
    trace: Path | None,
    calls: int,
    onnx: Path | None,
    html: Path | None,
    placing: PlacementOptions,
    cache: bool,
    as_json: bool,
) -> None:
    """Time MODEL, an ONNX file, here, in stock TVM and in ONNX Runtime, in interleaved rounds.

    A compiled library is timed alone, unless --onnx names the file that it was compiled from.

    \b
    relax-hetero bench model.onnx
    relax-hetero bench model.onnx --html report.html
    relax-hetero bench model.so --onnx model.onnx
    relax-hetero bench model.onnx --vdevice llvm --vdevice cuda:0 --place-auto --json
    relax-hetero bench model.onnx --vdevice llvm --vdevice cuda:0 --place-auto --trace out.json
    """
    threads = threads or len(allowed_cpus())  # respects taskset and containers
    # TVM reads these when it starts its threads, so set them before anything below imports it.
    os.environ["TVM_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    from ..report.text.call_tables import memory_line, use_with
    from ..report.text.explanation import print_idle_devices
    from ..report.text.kernel_tables import precisions_text, product_precisions
    from .arrays import random_arrays
    from .models import obtain, refuse_language_model

    refuse_language_model(model)
    if trace is not None:
        refuse_overwriting(trace, model)
    if html is not None:
        from ..report.written_report import report_path

        refuse_overwriting(report_path(html), model)
    compiled = obtain(model, placing, cache)
    source = onnx or compiled.onnx
    signature = compiled.executable.signature()
    inputs = random_arrays(signature, dict(placing.shapes), seed, {})
    engines = [this_library(compiled)]
    if source is not None and stock:
        engines.append(stock_tvm(source, dict(placing.shapes)))
    if source is not None:
        engines.append(onnx_runtime(source, threads))
    results = _measure(engines, inputs, rounds, budget)
    precisions = product_precisions(compiled.executable.metadata.fusions)
    memory = use_with(compiled.executable.memory_plan, signature, inputs)
    traced_calls = None
    if trace is not None and not results[0].failure:
        traced_calls = trace_calls(compiled.executable, inputs, calls, trace)
    if as_json:
        print_json(
            {
                "model": str(model),
                "threads": threads,
                "rounds": rounds,
                "engines": [result.to_json() for result in results],
                "precisions": precisions,
                "cache": asdict(compiled.executable.metadata.cache),
                "memory": None if memory is None else memory.to_json(),
                "trace": None if traced_calls is None else traced_calls.to_json(),
            }
        )
    else:
        _print_results(model, threads, results)
        print_idle_devices(compiled.executable)
        console().print(precisions_text(precisions), markup=False)
        console().print(f"Compile cache: {compiled.executable.metadata.cache}.", markup=False)
        if memory is not None:
            console().print(memory_line(memory), markup=False)
        if traced_calls is not None:
            traced_calls.print()
    if html is not None:
        _write_report(html, model, compiled.executable, inputs, threads, results)
    if results[0].failure:
        raise HeteroError(f"{OURS} fails on {model}: {results[0].failure}")


def _write_report(
    path: Path,
    model: Path,
    executable: Executable,
    inputs: Mapping[str, np.ndarray],
    threads: int,
    results: list[Result],
) -> None:
    """Write a report with these times, and with a profile of a call."""
    from ..report.call_times import bench_of
    from ..report.written_report import write_report
    from ..vm.machine import VirtualMachine

    times = {result.name: result.timing.seconds if result.timing else [] for result in results}
    bench = bench_of(threads, times, {result.name: result.failure for result in results if result.failure})
    profile = None
    if not results[0].failure:
        machine = VirtualMachine(executable)
        machine["main"](*inputs.values())  # warm-up: memory is allocated
        profile = machine.profile("main", *inputs.values())
    write_report(executable, path, profile=profile, bench=bench, title=model.stem)
    console(stderr=True).print(f"Wrote {path}: open it in a browser.", markup=False)


@dataclass
class Result:
    """Row of the table; `failure` is the reason if there are no times."""

    name: str
    failure: str = ""
    max_abs_diff: float | None = None
    timing: Timing | None = None
    ratios: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data, with times in milliseconds."""
        timing = self.timing
        return {
            "name": self.name,
            "fails": self.failure or None,
            "median_ms": timing.median * 1e3 if timing else None,
            "fastest_ms": timing.fastest * 1e3 if timing else None,
            "calls": len(timing.seconds) if timing else 0,
            "max_abs_diff": self.max_abs_diff,
            "times_slower_than": self.ratios,
        }


def _measure(engines: list[Engine], inputs: Mapping[str, np.ndarray], rounds: int, budget: float) -> list[Result]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("Preparing", total=len(engines))
        calls: dict[str, Call] = {}
        outputs: dict[str, list[np.ndarray]] = {}
        results = {engine.name: Result(engine.name) for engine in engines}
        for engine in engines:
            progress.update(task, description=f"Preparing {engine.name}")
            try:
                call = engine.make()
                outputs[engine.name] = call(inputs)
                calls[engine.name] = call
            except Exception as error:  # any failure is shown in the table
                results[engine.name].failure = _first_line(error)
            progress.advance(task)
        task = progress.add_task("Timing", total=rounds * len(calls))

        def advance(name: str) -> None:
            progress.update(task, description=f"Timing {name}", advance=1)

        bound = {name: partial(call, inputs) for name, call in calls.items()}
        timings = interleave(bound, rounds, budget, advance)
    for name, timing in timings.items():
        results[name].timing = timing
        results[name].max_abs_diff = _largest_difference(outputs[name], outputs.get(REFERENCE))
        results[name].ratios = {
            other: timing.median / timings[other].median for other in (OURS, REFERENCE) if other in timings
        }
    return list(results.values())


def _largest_difference(outputs: list[np.ndarray], expected: list[np.ndarray] | None) -> float | None:
    if expected is None or [array.shape for array in outputs] != [array.shape for array in expected]:
        return None
    differences = [
        np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0)
        for a, b in zip(outputs, expected, strict=True)
    ]
    return float(max(differences, default=0.0))


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def _print_results(model: Path, threads: int, results: list[Result]) -> None:
    columns = ["", "median ms", "fastest ms", "calls", f"vs {OURS}", f"vs {REFERENCE}", "max abs diff"]
    rows = []
    for result in results:
        if result.timing is None:
            rows.append([result.name, f"fails: {result.failure}", "", "", "", "", ""])
            continue
        timing, ratios = result.timing, result.ratios or {}
        rows.append(
            [
                result.name,
                f"{timing.median * 1e3:.3f}",
                f"{timing.fastest * 1e3:.3f}",
                str(len(timing.seconds)),
                *(f"{ratios[other]:.3g}x" if other in ratios else "" for other in (OURS, REFERENCE)),
                "" if result.max_abs_diff is None else f"{result.max_abs_diff:.2g}",
            ]
        )
    print_table(f"{model.name}, {threads} threads, one call from numpy to numpy", columns, rows, right=columns[1:])
    if len(results) > 1:
        console().print(f"Differences are from {REFERENCE}'s outputs; more than 1x means slower than.", markup=False)
    else:
        console().print("A library is timed alone: --onnx MODEL.onnx adds other engines.", markup=False)
