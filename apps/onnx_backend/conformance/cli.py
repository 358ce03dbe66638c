"""Command line of the conformance run."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import store
from .backends import BUILD_ONLY_VARIABLE, CONFIGURATIONS, GPU_CONFIGURATIONS, GPU_VARIABLE
from .cases import case_names
from .outcome import CRASHED, PASSED, RAISED, STATUSES, WRONG, Outcome
from .pool import APP, run_cases
from .report import YARDSTICKS, markdown

DOCUMENT = APP.parent.parent / "docs" / "reference" / "conformance.md"
TITLES = {
    "a": "(a) stock TVM",
    "b": "(b) one CPU device",
    "c": "(c) two CPU devices",
    "d": "(d) one GPU",
    "e": "(e) a GPU and a CPU",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Run ONNX's backend suite on stock TVM and relax_hetero."
    )
    parser.add_argument(
        "--config", default="abc", help="configurations to run, letters of 'abcde' (default: abc, without a GPU)"
    )
    parser.add_argument("--filter", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--status", default="", help="only cases whose last outcome in the store is this, e.g. wrong")
    parser.add_argument(
        "--lost",
        action="store_true",
        help="only cases that (a), or (b) for GPUs, passes and this configuration does not",
    )
    parser.add_argument("--every", type=int, default=1, help="only every N-th of the selected cases")
    parser.add_argument("--resume", action="store_true", help="skip cases that are already in the store")
    parser.add_argument("--results", type=Path, default=APP / ".results", help="folder of the store")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case may take (default 120)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further case begins")
    parser.add_argument(
        "--gpu", default="cuda", help="target of (d) and (e): cuda, opencl, llvm (a CPU in its place), or JSON"
    )
    parser.add_argument("--build-only", action="store_true", help="compile the cases, run none: needs no GPU")
    parser.add_argument("--json", type=Path, help="write all outcomes of the configurations run to this file")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCUMENT.name} from the store")
    parser.add_argument("--no-run", action="store_true", help="run nothing, report what the store holds")
    parser.add_argument("--smoke", action="store_true", help="very few cases, nothing stored: does the command work?")
    parser.add_argument("--list", action="store_true", help="list every case that did not pass")
    return parser


def _select(arguments: argparse.Namespace, configuration: str) -> list[str]:
    stored = store.read(arguments.store, configuration)
    names = [name for name in case_names() if re.search(arguments.filter, name)]
    if arguments.status:
        names = [name for name in names if name in stored and stored[name].status == arguments.status]
    if arguments.lost:
        yardstick = store.read(arguments.results, YARDSTICKS.get(configuration, "a"))
        passed = {name for name, outcome in yardstick.items() if outcome.status == PASSED}
        names = [name for name in names if name in passed and name in stored and stored[name].status != PASSED]
    if arguments.resume:
        names = [name for name in names if name not in stored]
    return names[:: arguments.every]


def _run(arguments: argparse.Namespace, configuration: str, console: Console) -> list[Outcome]:
    names = _select(arguments, configuration)
    outcomes: list[Outcome] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(TITLES[configuration], total=len(names), counts="")
        counts: Counter[str] = Counter()

        def report(outcome: Outcome) -> None:
            store.append(arguments.store, configuration, outcome)
            outcomes.append(outcome)
            counts[outcome.status] += 1
            text = "  ".join(f"{status} {counts[status]}" for status in STATUSES if counts[status])
            progress.update(task, advance=1, counts=text)

        run_cases(names, configuration, report, arguments.workers, arguments.timeout, arguments.budget)
    return outcomes


def _print(results: dict[str, list[Outcome]], console: Console, list_all: bool) -> None:
    table = Table("", *STATUSES, "total")
    for configuration, outcomes in results.items():
        counts = Counter(outcome.status for outcome in outcomes)
        table.add_row(TITLES[configuration], *(str(counts[status]) for status in STATUSES), str(len(outcomes)))
    console.print(table)
    shown = set(STATUSES) - {PASSED} if list_all else {WRONG, CRASHED}
    for configuration, outcomes in results.items():
        for outcome in sorted(outcomes, key=lambda each: each.name):
            ours_raised = configuration != "a" and outcome.status == RAISED
            if outcome.status in shown or ours_raised:
                text = f"({configuration}) {outcome.status}: {outcome.name}: {outcome.detail.splitlines()[0][:300]}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def _is_conformant(results: dict[str, list[Outcome]], folder: Path, console: Console) -> bool:
    """True if all but (a) pass the cases of their yardstick, and fail in others only with a HeteroError."""
    good = True
    for configuration, outcomes in results.items():
        yardstick = store.read(folder, YARDSTICKS[configuration]) if configuration in YARDSTICKS else {}
        for outcome in outcomes if configuration in YARDSTICKS else []:
            bad = outcome.status in (WRONG, RAISED, CRASHED)
            lost = outcome.status != PASSED and outcome.name in yardstick and yardstick[outcome.name].status == PASSED
            if lost and not bad:
                text = f"({configuration}) lost: {outcome.name}: {outcome.detail}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            good = good and not bad and not lost
    return good


def _check_gpu(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the command if configurations need a GPU and there is none."""
    if arguments.no_run or arguments.build_only or not set(arguments.config) & set(GPU_CONFIGURATIONS):
        return
    from relax_hetero.target.backend import backend_of

    backend = backend_of(json.loads(arguments.gpu)["kind"] if arguments.gpu.startswith("{") else arguments.gpu)
    if not backend.count():
        parser.error(
            f"(d) and (e) need {backend.description or backend.kind}, found none {backend.why_absent()}: "
            "--build-only compiles the cases, --gpu llvm uses a CPU"
        )


def main() -> None:
    """Run, print the table, optionally write the document; exit with 1 if (b) to (e) are not conformant."""
    parser = _parser()
    arguments = parser.parse_args()
    if unknown := set(arguments.config) - set(CONFIGURATIONS):
        parser.error(f"--config {''.join(sorted(unknown))}: configurations are {''.join(CONFIGURATIONS)}")
    if arguments.smoke:
        arguments.every, arguments.workers, arguments.write_docs = 1000, 1, False
        arguments.results = Path(tempfile.mkdtemp())
    console = Console(emoji=False)
    _check_gpu(parser, arguments)
    arguments.store = arguments.results
    os.environ[GPU_VARIABLE] = arguments.gpu
    if arguments.build_only:
        os.environ[BUILD_ONLY_VARIABLE] = "1"
        arguments.store = arguments.results / "built"
    os.nice(5)  # a sweep is long, and the machine has other users
    results: dict[str, list[Outcome]] = {}
    for configuration in arguments.config:
        if arguments.no_run:
            stored = store.read(arguments.store, configuration)
            results[configuration] = [stored[name] for name in _select(arguments, configuration) if name in stored]
        else:
            results[configuration] = _run(arguments, configuration, console)
    _print(results, console, arguments.list)
    if arguments.json:
        document = {key: [outcome.to_json() for outcome in outcomes] for key, outcomes in results.items()}
        arguments.json.write_text(json.dumps(document, indent=1))
    if arguments.write_docs:
        stored = {key: store.read(arguments.results, key) for key in CONFIGURATIONS}
        DOCUMENT.write_text(markdown(stored, DOCUMENT.read_text()))
        console.print(f"wrote {DOCUMENT}")
    if not (arguments.smoke or _is_conformant(results, arguments.results, console)):
        sys.exit(1)
