"""``placement="auto"`` compared with the best of each device alone and of eight cuts by hand.

python apps/bench/placements.py bert resnet50 squeezenet --vdevice llvm --vdevice cuda:0
python apps/bench/placements.py bert resnet50 --share 0.6        # the second device may hold 0.6 of the model
python apps/bench/placements.py squeezenet --vdevice llvm:0 --vdevice llvm:1
python apps/bench/placements.py squeezenet minilm --within 60         # leaves out what takes longer to compile

A cut by hand gives the first nodes to one device and the rest to the other, at one to four fifths of the nodes, both
ways; under a memory limit, at shares of the weights that fit. Placements are compiled in parallel, in processes, and
timed in turns in one process, from arrays to arrays. Results are compared with those of the first device alone. Each
result is printed on standard error at once.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from bars import Check, verdict
from model_zoo import model_path, random_arrays
from rich.console import Console
from rich.table import Table
from smoke import SMALL_MODEL, smoke

BAR = 1.05
"""Maximum time of the chosen placement over that of the best one."""
ALLOWED = 1e-2
"""Largest allowed difference of results, relative to the largest number of an output."""
AUTO = "auto"
SHARES = (0.5, 0.75, 0.9, 0.97)
"""Shares of a memory limit that cuts by hand use for weights."""


@dataclass(frozen=True)
class Case:
    """A placement of a model to compile."""

    model: str
    name: str
    vdevices: tuple[str, str]
    rules: tuple[tuple[str, str], ...] | None
    limit: int | None
    precision: str

    def build(self, folder: str) -> dict[str, Any]:
        """Compile to a library in this process."""
        import relax_hetero as rh

        begin = time.perf_counter()
        model = named(self.model)
        options: dict[str, Any] = {"placement": self.rules}
        if self.rules is None:
            options = {"placement": "auto"} | (
                {} if self.limit is None else {"memory_limit": {self.vdevices[1]: self.limit}}
            )
        try:
            mod = rh.from_onnx(model, list(self.vdevices), **options)
            if self.precision != "float32":
                mod = rh.transform.ToMixedPrecision(self.precision)(mod)
            path = str(Path(folder) / f"{Path(self.model).stem}_{self.name}.so".replace(" ", "_").replace(":", ""))
            executable = rh.compile(mod)
            executable.export_library(path)
        except rh.HeteroError as error:
            return {"name": self.name, "fails": str(error)[:300]}
        line = {"name": self.name, "path": path, "seconds": time.perf_counter() - begin}
        if self.rules is None:
            expected = executable.metadata.placement_estimate
            places = [op["device_index"] for op in executable.metadata.placement if op["kind"] == "op"]
            line["ops"] = {device: places.count(index) for index, device in enumerate(self.vdevices)}
            line["expected_ms"] = expected["seconds"] * 1e3
            line["alone_ms"] = {device: 1e3 * s for device, s in expected["single_device_seconds"].items()}
        return line


class Builders:
    """Processes that compile in parallel.

    Parameters
    ----------
    until : float
        Time of `time.monotonic` until which results are awaited.
    """

    def __init__(self, until: float) -> None:
        self._until = until
        self._folder = tempfile.TemporaryDirectory()
        count = max(1, (os.cpu_count() or 2) // 2)
        self._pool = multiprocessing.get_context("spawn").Pool(count)

    def build(self, cases: Iterable[Case]) -> list[dict[str, Any]]:
        """Build all cases; returns their results, in order."""
        waiting = [(case.name, self._pool.apply_async(case.build, (self._folder.name,))) for case in cases]
        return [self._result(name, result) for name, result in waiting]

    def _result(self, name: str, result: Any) -> dict[str, Any]:
        try:
            line: dict[str, Any] = result.get(max(0.0, self._until - time.monotonic()))
        except multiprocessing.TimeoutError:
            line = {"name": name, "fails": "was not compiled in time"}
        tell(name, line.get("fails") or f"compiled in {line['seconds']:.1f} s")
        return line

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._pool.terminate()
        self._folder.cleanup()


def tell(*words: object) -> None:
    """Print a result at once, in case the run is interrupted."""
    print(*words, file=sys.stderr, flush=True)


def named(model: str) -> onnx.ModelProto:
    """The model with a name for every node."""
    proto = onnx.load(model)
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.name or node.op_type}_{index}"
    return proto


def cases_of(
    model: str, vdevices: tuple[str, str], limit: int | None, precision: str, cuts: int, whole: int = 0
) -> list[Case]:
    """Each device alone, the automatic placement, and cuts by hand.

    Under a memory limit, `whole` is the number of bytes that the second device needs for the whole model.
    """
    first, second = vdevices

    def case(name: str, rules: tuple[tuple[str, str], ...] | None) -> Case:
        return Case(model, name, vdevices, rules, limit, precision)

    nodes = [node.name for node in named(model).graph.node]
    cases = [case(f"{device} alone", (("*", device),)) for device in vdevices]
    cases.append(case(AUTO, None))
    for cut in cut_positions(named(model), limit, cuts, True, whole):
        cases.append(case(f"{second} to node {cut}", (*((name, second) for name in nodes[:cut]), ("*", first))))
    for cut in cut_positions(named(model), limit, cuts, False, whole):
        cases.append(case(f"{second} from node {cut}", (*((name, first) for name in nodes[:cut]), ("*", second))))
    return cases


def cut_positions(model: onnx.ModelProto, limit: int | None, cuts: int, before: bool, whole: int) -> list[int]:
    """Positions of cuts by hand: fifths of the nodes, or as many nodes as have weights that fit within the limit.

    Besides the weights of the first nodes, all other values must fit; the last nodes have few of these.
    """
    count = len(model.graph.node)
    if limit is None:
        return [max(1, count * part // (cuts + 1)) for part in range(1, cuts + 1)]
    sizes = {tensor.name: onnx.numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer}
    weights = [sum(sizes.get(name, 0) for name in node.input) for node in model.graph.node]
    sums = list(itertools.accumulate(weights if before else weights[::-1]))
    room = limit - max(0, whole - sum(weights)) if before else limit
    counts = [sum(nbytes <= room * share for nbytes in sums) for share in SHARES[-cuts:]]
    return [max(1, number if before else count - number) for number in counts]


def needs(path: str, device: int) -> int:
    """Bytes that a call of a library needs on a device."""
    import relax_hetero as rh

    return int(rh.load(path).memory_plan.needs("main", {}, 1)[device].total)


def timed(built: list[dict[str, Any]], inputs: dict[str, np.ndarray], limits: Any, seconds: float) -> None:
    """Add the median milliseconds of each library, timed in turns, and its largest difference from the first."""
    import relax_hetero as rh

    machines = []
    for entry in built:
        try:
            if "path" in entry:
                machine = rh.vm.VirtualMachine(rh.load(entry["path"]), max_in_flight=1, memory_limit=limits)
                machines.append((entry, machine))
        except rh.MemoryLimitError as error:
            entry["fails"] = f"the limit: {str(error)[:160]}"

    def call(machine: Any) -> list[np.ndarray]:
        result = machine["main"](**inputs)
        return [np.asarray(part) for part in (result if isinstance(result, tuple) else (result,))]

    reference: list[np.ndarray] | None = None
    rounds: dict[str, list[float]] = {}
    for entry, machine in machines:
        outputs = call(machine)
        reference = reference or outputs
        entry["error"] = max(
            float(np.max(np.abs(a.astype("float64") - b)) / max(float(np.max(np.abs(b))), 1e-9))
            for a, b in zip(outputs, reference, strict=True)
            if a.size
        )
        call(machine)
        rounds[entry["name"]] = []
    end = time.perf_counter() + seconds
    while machines and (time.perf_counter() < end or len(rounds[machines[0][0]["name"]]) < 3):
        for entry, machine in machines:
            begin = time.perf_counter()
            call(machine)
            once = time.perf_counter() - begin
            repeats = min(20, int(0.01 / once))
            begin = time.perf_counter()
            for _ in range(repeats):
                call(machine)
            rounds[entry["name"]].append((time.perf_counter() - begin) / repeats if repeats else once)
    for entry, _ in machines:
        entry["ms"] = statistics.median(rounds[entry["name"]]) * 1e3
        tell({key: entry[key] for key in ("name", "ms", "error", "expected_ms", "alone_ms", "ops") if key in entry})


@click.command()
@click.argument("models", nargs=-1)
@click.option("--vdevice", "vdevices", multiple=True, default=("llvm:0", "cuda:0"), show_default=True, help="Two.")
@click.option("--share", type=float, help="Memory limit of the second device, as a share of what it needs alone.")
@click.option("--cuts", default=4, show_default=True, type=click.IntRange(1, 4), help="Cuts by hand, each way.")
@click.option("--precision", default="float32", show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Seconds for which a model's placements are timed.")
@click.option("--within", default=3600.0, show_default=True, help="Time limit of compilation, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(models=(SMALL_MODEL,), vdevices=("llvm:0", "llvm:1"), seconds=0.0, cuts=1)
def main(
    models: tuple[str, ...], vdevices: tuple[str, ...], share: float | None, cuts: int, precision: str,
    seconds: float, within: float, as_json: bool,
) -> None:  # fmt: skip
    if len(vdevices) != 2:
        raise click.UsageError("--vdevice is given twice: two devices are chosen among")
    from relax_hetero.frontend import CostModel
    from relax_hetero.target.vdevice import parse_vdevices

    # Measured before other processes compile.
    tell("figures", CostModel.measured(parse_vdevices(vdevices)))
    checks, lines = [], []
    with Builders(time.monotonic() + within) as builders:
        for name in models or ("squeezenet", "resnet50", "bert"):
            model, limit, whole = str(model_path(name)), None, 0
            # Single devices first: the compile cache then has all kernels of GPUs.
            built = builders.build(cases_of(model, vdevices, None, precision, cuts)[:2])
            if share is not None:
                if "path" not in built[1]:
                    sys.exit(f"{name} on {vdevices[1]} alone {built[1]['fails']}: no share of what it needs is known")
                whole = needs(built[1]["path"], 1)
                limit = int(share * whole)
            built += builders.build(cases_of(model, vdevices, limit, precision, cuts, whole)[2:])
            inputs = random_arrays(named(model).graph, {}, 0)
            timed(built, inputs, None if limit is None else {vdevices[1]: limit}, seconds)
            lines.append({"model": name, "limit": limit, "placements": built})
            times = {entry["name"]: entry["ms"] for entry in built if "ms" in entry}
            if AUTO in times:
                checks.append(Check(f"{name}: auto over the best", times[AUTO] / min(times.values()), BAR, True))
                tell(checks[-1])
            if not as_json:
                show(lines[-1])
    if as_json:
        click.echo(json.dumps(lines))
    for check in checks:
        Console(stderr=as_json).print(f"{verdict(check)}: {check}", markup=False)
    wrong = [entry["name"] for line in lines for entry in line["placements"] if entry.get("error", 0) > ALLOWED]
    lacking = [line["model"] for line in lines if not any("ms" in e and e["name"] == AUTO for e in line["placements"])]
    if wrong or lacking:
        sys.exit(f"wrong results: {wrong}; no chosen placement ran: {lacking}")
    sys.exit(0 if all(check.passed for check in checks) else 1)


def show(line: dict[str, Any]) -> None:
    """Print the table of a model."""
    limit = "" if line["limit"] is None else f", at most {line['limit'] / 1e6:.0f} MB on the second device"
    table = Table(title=f"{Path(line['model']).stem}{limit}")
    for column in ("placement", "ms", "error", "compiled, s", "remarks"):
        table.add_column(column, justify="left" if column in ("placement", "remarks") else "right")
    for entry in line["placements"]:
        remarks = entry.get("fails", "")
        if "ops" in entry:
            alone = ", ".join(f"{device} {ms:.2f}" for device, ms in entry["alone_ms"].items())
            remarks += f"ops {entry['ops']}, expected {entry['expected_ms']:.2f} ms, alone {alone}"
        numbers = [f"{entry[key]:.{digits}g}" if key in entry else "" for key, digits in (("ms", 4), ("error", 2))]
        table.add_row(entry["name"], *numbers, f"{entry['seconds']:.1f}" if "seconds" in entry else "", remarks)
    Console().print(table)


if __name__ == "__main__":
    main()
