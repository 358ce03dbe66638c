"""Arrangements of a random llama on the devices of this machine: simulated times against measured ones.

python apps/bench/llm_bench/scaling_validation.py                                    # CPU devices of one core
python apps/bench/llm_bench/scaling_validation.py --vdevice cuda --shape 8b --layers 6 --batches 1,32 --chunk 2048

`relax-hetero scale --measure` simulates: some layers are timed on one device, all other times follow from them. Each
arrangement is loaded by `rh.llm.load`, and called as an engine calls it. All are timed in turns.

Virtual machines change their speed: cores that read memory at the same time do so at one of several rates, for
milliseconds or minutes. So that is measured between every two calls of CPU devices, each of which is compared with the
simulation at the rates before and after, and does not count if these differ.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, simulated_time  # noqa: E402
from smoke import smoke  # noqa: E402
from turns import real_time, wait_until_idle  # noqa: E402

from llm_bench import random_gguf  # noqa: E402
from llm_bench.loaded_model import LoadedModel  # noqa: E402
from llm_bench.random_gguf import SHAPES, write_gguf  # noqa: E402
from relax_hetero.frontend import LinkCost, PagedCache  # noqa: E402
from relax_hetero.frontend.auto.measure_devices import SharedBandwidth  # noqa: E402
from relax_hetero.frontend.gguf.choose_rules import rules_of  # noqa: E402
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of  # noqa: E402
from relax_hetero.frontend.gguf.place_layers import LayerProblem  # noqa: E402
from relax_hetero.frontend.gguf.scaling import Fleet, Pipeline, can_share  # noqa: E402
from relax_hetero.frontend.language_model_files import read_language_model  # noqa: E402
from relax_hetero.llm.calibrate import STEPS, calibrate  # noqa: E402
from relax_hetero.tools.scale import fleet_of  # noqa: E402

STEADY = 1.1
"""Longer over shorter simulated time at the rates before and after a call that counts."""
PROBED_STEPS, PROBE_CALLS = 2, 2
"""Decode steps of a call of CPU devices, and calls of a probe of their memory, so that both see the same machine."""
TURN_SECONDS = 0.25
"""Time of the calls of a turn, unless one takes longer."""


@dataclass(frozen=True)
class Case:
    """An arrangement: devices of a group, stages, replicas, and calls of a decode step that follow each other."""

    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    calls: int = 1

    def __str__(self) -> str:
        texts = [f"{self.tensor} in a group"] * (self.tensor > 1) + [f"{self.stages} stages"] * (self.stages > 1)
        texts += [f"{self.replicas} replicas"] * (self.replicas > 1)
        return " x ".join(texts or ["one device"]) + f", {self.calls} calls" * (self.calls > 1)


def cases(devices: int, is_gpu: bool) -> Iterator[Case]:
    """Arrangements of at most so many devices."""
    yield Case()
    if devices == 1:
        return
    yield Case(tensor=devices)
    yield Case(stages=devices)
    yield Case(replicas=devices)
    if is_gpu:
        yield Case(stages=devices, calls=devices)
    else:  # one of them works at a time
        yield Case(stages=2 * devices)


@click.command(help=__doc__)
@click.option("--vdevice", default="llvm", show_default=True)
@click.option("--devices", default=2, show_default=True)
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="1b", show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--kind", default="F16", show_default=True, help="Type of the matrices.")
@click.option("--batches", default="1,8", show_default=True, help="Texts of each replica in decode steps, a list.")
@click.option("--chunk", default=256, show_default=True, help="Tokens of a prefill.")
@click.option("--context", default=256, show_default=True, help="Tokens of a sequence in a decode step.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--only", multiple=True, help="Arrangements whose names have this text, such as 'group'. Repeatable.")
@click.option(
    "--real-time",
    "is_real_time",
    is_flag=True,
    help="Time before all other programs of this machine; needs privileges (root, or CAP_SYS_NICE).",
)
@smoke(shape="tiny", layers=4, batches="2", chunk=32, context=32, rounds=1)
def main(
    vdevice: str,
    devices: int,
    shape: str,
    layers: int,
    kind: str,
    batches: str,
    chunk: int,
    context: int,
    rounds: int,
    only: tuple[str, ...],
    is_real_time: bool,
) -> None:
    """Simulate and measure each arrangement."""
    random_gguf.RANDOM_ROWS = 1021
    is_gpu, counts = vdevice != "llvm", tuple(map(int, batches.split(",")))
    device: Any = vdevice if is_gpu else {"kind": vdevice, "num-cores": 1}
    if is_gpu and (there := sum(tvm.device(vdevice, number).exist for number in range(devices))) < devices:
        print(f"{there} of {devices} GPUs are there: arrangements of more are left out", flush=True)
        devices = max(1, there)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder, "model.gguf"), replace(SHAPES[shape], layers=layers), kind, 0)
        file = read_language_model(path)
        sizes = hyperparameters_of(file)
        with real_time(is_real_time):
            vdevices, costs, fleet = fleet_of(device, 1, 2 * devices, LinkCost(1e9, 1e-3), measure=True)
        cache = PagedCache(counts, (chunk,), max(counts), max(context, chunk) + 64)
        with real_time(is_real_time):
            calibration = calibrate(file, cache, vdevices, costs, max(counts))
        problem = LayerProblem(file, sizes, cache, vdevices[:1], costs, {})
        print(f"{fleet}\n{calibration}", flush=True)
        shared = SharedBandwidth.of(vdevices[0])
        steps = STEPS if shared is None else PROBED_STEPS
        calls: dict[str, Callable[[], object]] = {}
        expected: dict[str, Callable[[float], float]] = {}
        for case in cases(devices, is_gpu):
            if (case.tensor > 1 and not can_share(sizes, case.tensor)) or not any(
                text in str(case) for text in only or ("",)
            ):
                continue
            own_fleet = replace(fleet, devices=case.tensor * case.stages * case.replicas)

            def simulated(rate: float, case: Case = case, fleet: Fleet = own_fleet) -> Pipeline:
                groups = replace(fleet, shared_bandwidth=rate), case.tensor, case.stages, case.replicas
                return Pipeline(problem.search.parts, sizes, costs, *groups, calibration)

            # CPU replicas would share what they read of one file in a cache.
            paths = [path] * case.replicas
            for replica in range(1, 1 if is_gpu else case.replicas):
                paths[replica] = Path(folder, f"replica{replica}.gguf")
                write_gguf(paths[replica], replace(SHAPES[shape], layers=layers), kind, replica)
            loaded = _load(case, paths, device, simulated(fleet.shared_bandwidth), counts, chunk, context)
            for texts in counts:
                if texts % case.calls:
                    continue
                name = f"{case}: decode {texts}"
                calls[name] = _together([each.step(texts, steps) for each in loaded])
                expected[name] = partial(_decode_seconds, simulated, texts, context, texts // case.calls)
            if case.calls == 1:
                calls[f"{case}: prefill"] = _together([each.prefill(chunk) for each in loaded])
                expected[f"{case}: prefill"] = lambda rate, of=simulated: of(rate).prefill(chunk, chunk)
            print(f"{case}: loaded in {max(each.seconds for each in loaded):.1f} s", flush=True)
        for call in calls.values():
            call()
        gc.disable()
        with real_time(is_real_time):
            timed = _timed(calls, rounds, shared)
        if shared is not None:
            rates = sorted(each.after for samples in timed.values() for each in samples)
            print(
                f"devices read {rates[0] / 1e9:.1f} to {rates[-1] / 1e9:.1f} GB/s each at the same time, in "
                f"{len(rates)} probes",
                flush=True,
            )
        for name, samples in timed.items():
            checks.append(_check(name, samples, expected[name], 1 if "prefill" in name else steps))
        calls.clear()
        gc.collect()
    if not all(check.passed for check in checks):
        raise SystemExit(1)


@dataclass(frozen=True)
class Sample:
    """A timed call.

    Attributes
    ----------
    seconds : float
    before, after : float
        `SharedBandwidth.measure` right before and after.
    """

    seconds: float
    before: float
    after: float


def _timed(
    calls: dict[str, Callable[[], object]], rounds: int, shared: SharedBandwidth | None
) -> dict[str, list[Sample]]:
    """Calls of each arrangement, in turns whose order changes from round to round."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            wait_until_idle()
            end, rate = time.perf_counter() + TURN_SECONDS, _rate(shared)
            while time.perf_counter() < end:
                before, begin = rate, time.perf_counter()
                calls[name]()
                seconds, rate = time.perf_counter() - begin, _rate(shared)
                samples[name].append(Sample(seconds, before, rate))
    return samples


def _rate(shared: SharedBandwidth | None) -> float:
    return math.inf if shared is None else shared.measure(PROBE_CALLS)


def _check(name: str, samples: list[Sample], expected: Callable[[float], float], steps: int) -> Check:
    """The verdict on the median of simulated over measured times of a step, of calls during a steady rate."""
    times = []
    for sample in samples:
        before, after = (steps * expected(rate) for rate in (sample.before, sample.after))
        if max(before, after) <= STEADY * min(before, after):
            times.append(((before + after) / 2, sample.seconds))
    if not times:
        print(f"{name}: no call counts: the machine changed its speed during each of {len(samples)}")
        return simulated_time(name, samples[0].seconds / steps, math.nan)
    times.sort(key=lambda pair: pair[0] / pair[1])
    low, high = (times[len(times) * part // 4] for part in (1, 3))
    simulated, measured = times[len(times) // 2]
    print(
        f"{name}: quartiles {low[0] / low[1]:.2f} and {high[0] / high[1]:.2f} of {len(times)} calls"
        + f"; {len(samples) - len(times)} do not count: the machine changed its speed" * (len(times) < len(samples))
    )
    return simulated_time(name, measured / steps, simulated / steps)


def _decode_seconds(simulated: Callable[[float], Pipeline], texts: int, context: int, batch: int, rate: float) -> float:
    """Simulated time of a step."""
    return simulated(rate).decode(texts, context, batch)[0]


def _load(
    case: Case,
    paths: list[Path],
    device: Any,
    simulated: Pipeline,
    counts: tuple[int, ...],
    chunk: int,
    context: int,
) -> list[LoadedModel]:
    """The replicas; stages have the layers of the simulated ones."""
    batches = tuple(sorted({-(-texts // case.calls) for texts in counts}))
    own: Any = [device] * (case.tensor * case.stages)
    rules = rules_of(simulated) if case.stages * case.tensor > 1 else None
    loaded = []
    for replica, path in enumerate(paths):
        if case.replicas > 1 and isinstance(device, str):
            own = [f"{device}:{replica}"]
        options: dict[str, Any] = {} if case.calls == 1 else {"slots": max(counts)}
        loaded.append(LoadedModel(path, own, rules, context, batches, (chunk,), **options))
    return loaded


def _together(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """A call of all at the same time."""
    if len(calls) == 1:
        return calls[0]
    pool = ThreadPoolExecutor(len(calls))
    return lambda: list(pool.map(lambda call: call(), calls))


if __name__ == "__main__":
    main()
