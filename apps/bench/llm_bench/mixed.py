"""A mixture of experts over a CPU and a GPU, on each alone, and llama.cpp in the same places: speed, loading, memory.

python apps/bench/llm_bench/mixed.py --layers 8 --llama-bench PATH    # 4-bit weights, layers of Qwen3-30B-A3B
python apps/bench/llm_bench/mixed.py --placements cpu --threads 2     # without a GPU

A file of random weights is written and loaded by `rh.llm.load`, each placement in a process of its own. A process
computes only in its turn: each round takes all placements of ours and of llama.cpp one after another, and figures are
medians over the rounds. Decode steps follow `DEPTH` tokens of different texts. Those of one text and all prefill of
llama.cpp are measured by llama-bench, with the better one of two micro-batches, and decode steps of several texts by
llama-batched-bench, if it is beside llama-bench. The memory rate of the CPU is that of all threads reading 1 GB.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tvm  # noqa: E402
from bars import Check, verdict  # noqa: E402
from smoke import smoke  # noqa: E402

from llm_bench.contestant import memory  # noqa: E402
from llm_bench.loaded_model import LoadedModel  # noqa: E402
from llm_bench.random_gguf import MIXTURE, Sizes, write_gguf  # noqa: E402
from relax_hetero.llm.calibrate import STEPS  # noqa: E402

DEPTH = 128
"""Tokens of a text before the timed decode steps."""
TURN_SECONDS = 1.0
"""Minimum time of the calls of one work in a turn of ours, two of them at least."""
SAYS = Console(highlight=False, width=150)


class Placement(NamedTuple):
    """Devices of a model in both libraries.

    Attributes
    ----------
    rules : mapping of str to str
        Kind of device by patterns; rules on one kind alone are those of a single device.
    llama_cpp : tuple of str
        Arguments of llama.cpp's commands, which see a GPU only if the rules name it.
    bars : mapping of str to float
        Minimum ratio to llama.cpp, by kind of work.
    """

    rules: Mapping[str, str]
    llama_cpp: tuple[str, ...]
    bars: Mapping[str, float]


ALL_EXPERTS = ("-ngl", "99", "-ncmoe", "999")
PLACEMENTS = {
    "experts": Placement({"blk.*_exps": "cpu", "*": "gpu"}, ALL_EXPERTS, {"decode": 1.5, "prefill": 2.0}),
    "ffn": Placement({"blk.*.ffn_*": "cpu", "*": "gpu"}, ALL_EXPERTS, {"decode": 1.5, "prefill": 2.0}),
    "gpu": Placement({"*": "gpu"}, ("-ngl", "99"), {}),
    "cpu": Placement({"*": "cpu"}, ("-ngl", "0"), {"decode": 1.3, "prefill": 2.0}),
}
MEMORY_RATE_BAR, MEMORY_BAR = 0.75, 1.05
"""Minimum share of the CPU's memory rate that experts' bytes reach; maximum of resident bytes over file and cache."""
TINY = Sizes("qwen3moe", experts=8, experts_used=2, expert_width=64)
Work = tuple[str, int]
"""Kind of work, ``decode`` or ``prefill``, and the number of texts or tokens."""
Speeds = dict[Work, list[float]]
"""Tokens a second of each turn."""


def serve(pipe: Connection, path: Path, vdevices: list[str], rules: dict[str, str], sizes: dict[str, Any]) -> None:
    """Load a model, send its load time and memory, and time works until the input ends."""
    gpus = [tvm.runtime.device(name) for name in set(vdevices) - {"llvm"}]
    free = sum(int(gpu.available_global_memory or 0) for gpu in gpus)
    imported = memory()["resident"]
    model = LoadedModel(path, vdevices, rules if len(vdevices) > 1 else None, **sizes)
    figures = {"seconds": model.seconds, "process": memory()["resident"] - imported, "peak": memory()["peak"]}
    figures["cache"] = sum(model.model.cache.bytes.values())
    figures["gpu"] = free - sum(int(gpu.available_global_memory or 0) for gpu in gpus)
    pipe.send(figures)
    while (work := pipe.recv()) is not None:
        kind, count = work
        call, tokens = (model.step, STEPS * count) if kind == "decode" else (model.prefill, count)
        pipe.send(_rate(call(count), tokens))


def _rate(call: Any, tokens: int) -> float:
    """Tokens a second: the median of calls that follow an untimed one."""
    assert np.isfinite(np.asarray(call())).all(), "logits are not finite"
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < TURN_SECONDS:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return tokens / statistics.median(seconds)


class Ours:
    """A process with the model in one placement."""

    def __init__(self, path: Path, placement: Placement, gpu: str, sizes: dict[str, Any]) -> None:
        kinds = sorted(set(placement.rules.values()))
        vdevices = [{"cpu": "llvm", "gpu": gpu}[kind] for kind in kinds]
        names = {kind: f"vdevice:{index}" for index, kind in enumerate(kinds)}
        rules = {pattern: names[kind] for pattern, kind in placement.rules.items()}
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, path, vdevices, rules, sizes), daemon=True)
        self._process.start()
        other.close()

    def loaded(self, seconds: float) -> dict[str, float] | None:
        """Figures of loading; None, and the process is ended, if it failed or takes longer."""
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            pass
        self._process.kill()
        return None

    def speeds(self, works: Sequence[Work]) -> dict[Work, float]:
        """Tokens a second, of works up to one that ends the process."""
        speeds = {}
        with suppress(EOFError, BrokenPipeError):
            for work in works:
                self._pipe.send(work)
                speeds[work] = float(self._pipe.recv())
        return speeds

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join()


def llama_cpp(bench: Path, path: Path, placement: Placement, threads: int, works: Sequence[Work]) -> dict[Work, float]:
    """Tokens a second of llama.cpp's commands, in one turn."""
    arguments = ["-m", str(path), "-t", str(threads), *placement.llama_cpp]
    environment = dict(os.environ) | ({} if "gpu" in placement.rules.values() else {"CUDA_VISIBLE_DEVICES": ""})
    rows = [count for kind, count in works if kind == "prefill"]
    most = str(max(rows, default=512))
    prompts = ["-p", ",".join(map(str, rows)) or "0", "-b", most, "-ub", f"{min(512, int(most))},{most}"]
    speeds: dict[Work, float] = {}
    for line in _lines([bench, *arguments, *prompts, "-n", str(STEPS * 2), "-r", "2", "-o", "jsonl"], environment):
        work = ("prefill", line["n_prompt"]) if line["n_prompt"] else ("decode", 1)
        speeds[work] = max(speeds.get(work, 0.0), statistics.median(line["samples_ts"]))
    texts = [count for kind, count in works if kind == "decode" and count > 1]
    batched = bench.with_name("llama-batched-bench")
    if texts and batched.exists():
        arguments += ["-c", str(max(texts) * (DEPTH + 2 * STEPS)), "-npp", str(DEPTH), "-ntg", str(2 * STEPS)]
        arguments += ["-npl", ",".join(map(str, texts)), "--output-format", "jsonl"]
        for line in _lines([batched, *arguments], environment):
            speeds["decode", line["pl"]] = line["speed_tg"]
    return {work: speed for work, speed in speeds.items() if work in works}


def _lines(words: Sequence[object], environment: dict[str, str]) -> list[dict[str, Any]]:
    """A command's lines of JSON; the end of its errors is shown if it fails."""
    ran = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment)
    if ran.returncode:
        SAYS.print(f"{' '.join(map(str, words))} ended with {ran.returncode}:\n{ran.stderr[-2000:]}", markup=False)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def memory_rate(threads: int, size: int = 1 << 30) -> float:
    """Bytes a second that `threads` threads read, each a part of `size` bytes, in the fastest of five turns."""
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda _: np.ones(size // threads // 8, np.int64), range(threads)))

        def read() -> float:
            begin = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            return time.perf_counter() - begin

        return sum(part.nbytes for part in parts) / min(read() for _ in range(5))


def expert_bytes(path: Path, sizes: Sizes, texts: int) -> float:
    """Bytes of the experts that a decode step reads, if texts choose independently."""
    import gguf

    total = sum(int(one.n_bytes) for one in gguf.GGUFReader(path).tensors if "_exps." in one.name)
    return total * (1 - (1 - sizes.experts_used / sizes.experts) ** texts)


def measure(path: Path, names: Sequence[str], works: Sequence[Work], options: dict[str, Any]) -> dict[str, Any]:
    """Load all placements, and take turns; speeds and figures by library and placement."""
    counts = {kind: [count for other, count in works if other == kind] for kind in ("decode", "prefill")}
    sizes = {"context": DEPTH, "batches": counts["decode"], "chunks": counts["prefill"]}
    os.environ["TVM_NUM_THREADS"] = str(options["threads"])
    ours: dict[str, Ours] = {}
    figures: dict[str, dict[str, float]] = {}
    for name in names:
        process = Ours(path, PLACEMENTS[name], options["gpu"], sizes)
        found = process.loaded(options["timeout"])
        if found is None:
            SAYS.print(f"{name}: not loaded within {options['timeout']:.0f} s")
            continue
        ours[name], figures[name] = process, found
        SAYS.print(
            f"{name}: loaded in {found['seconds']:.1f} s; {found['process'] / 1e6:,.0f} MB of memory above the imports "
            f"and {found['gpu'] / 1e6:,.0f} MB of the GPU, of which the cache takes {found['cache'] / 1e6:,.0f} MB"
        )
    speeds: dict[tuple[str, str], Speeds] = {}
    for _ in range(options["rounds"]):
        for name in names:
            if name in ours:
                _add(speeds, ("ours", name), ours[name].speeds(works))
            if options["bench"]:
                turn = llama_cpp(options["bench"], path, PLACEMENTS[name], options["threads"], works)
                _add(speeds, ("llama.cpp", name), turn)
    for process in ours.values():
        process.close()
    medians = {who: {work: statistics.median(each) for work, each in of.items()} for who, of in speeds.items()}
    return {"speeds": medians, "figures": figures}


def _add(speeds: dict[tuple[str, str], Speeds], who: tuple[str, str], turn: Mapping[Work, float]) -> None:
    SAYS.print(*who, *(f"{kind} {count}: {speed:,.1f}" for (kind, count), speed in turn.items()), sep="  ")
    for work, speed in turn.items():
        speeds.setdefault(who, {}).setdefault(work, []).append(speed)


def show(results: dict[str, Any], names: Sequence[str], works: Sequence[Work], path: Path, sizes: Sizes) -> list[Check]:
    """Print the table of speeds; returns checks."""
    table, checks, rate = Table(title="tokens a second", title_justify="left"), [], results["memory_rate"]
    columns = ("placement", "work", "ours, ms", "ours", "llama.cpp", "ratio", "experts, GB/s", "of the memory rate")
    for column in columns:
        table.add_column(column, justify="left" if column in ("placement", "work") else "right")
    for name in names:
        ours, peer = (results["speeds"].get((who, name), {}) for who in ("ours", "llama.cpp"))
        for kind, count in works:
            own, other = ours.get((kind, count)), peer.get((kind, count))
            cells = [f"{count / own * 1e3:.2f}", f"{own:,.1f}"] if own else ["", ""]
            cells += [f"{other:,.1f}" if other else "", f"{own / other:.2f}" if own and other else ""]
            if own and other and kind in PLACEMENTS[name].bars and (kind == "prefill" or count == 1):
                title = f"{name}, {kind} {count}: over llama.cpp"
                checks.append(Check(title, own / other, PLACEMENTS[name].bars[kind]))
            if own and kind == "decode" and name != "gpu":
                reached = expert_bytes(path, sizes, count) * own / count
                cells += [f"{reached / 1e9:.1f}", f"{reached / rate:.2f}"]
                if count == 1 and name != "cpu":
                    checks.append(Check(f"{name}: share of the memory rate", reached / rate, MEMORY_RATE_BAR))
            table.add_row(name, f"{kind} {count}", *cells)
    SAYS.print(table)
    for name, figures in results["figures"].items():
        share = (figures["process"] + figures["gpu"]) / (path.stat().st_size + figures["cache"])
        checks.append(Check(f"{name}: memory over file and cache", share, MEMORY_BAR, at_most=True))
    return checks


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


@click.command(help=__doc__)
@click.option("--layers", default=8, show_default=True, help="0 for a tiny model.")
@click.option("--vocabulary", default=16384, show_default=True)
@click.option("--types", default="Q4_0", show_default=True, help="Type of the matrices.")
@click.option("--placements", default="experts,gpu,cpu", show_default=True, help=f"A list of {', '.join(PLACEMENTS)}.")
@click.option("--batches", default="1,8,32", show_default=True, help="Numbers of texts of decode steps, a list.")
@click.option("--prefill", default="512,4096", show_default=True, help="Numbers of tokens of prefill, a list.")
@click.option("--threads", default=14, show_default=True, help="Threads on the CPU.")
@click.option("--gpu", default="cuda", show_default=True, help="Device in the GPU's place.")
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="The command of llama.cpp.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each; 0 to load only.")
@click.option("--timeout", default=300.0, show_default=True, help="Maximum seconds of loading.")
@click.option("--model", type=click.Path(path_type=Path), help="Keep the file of random weights here, and reuse it.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
@smoke(layers=0, placements="cpu", batches="1,2", prefill="140", threads=2, rounds=1)
def main(
    layers: int,
    vocabulary: int,
    types: str,
    placements: str,
    batches: str,
    prefill: str,
    threads: int,
    gpu: str,
    llama_bench: Path | None,
    rounds: int,
    timeout: float,
    model: Path | None,
    json_file: Path | None,
) -> None:
    """Compare the placements."""
    counts = {"decode": _counts(batches), "prefill": _counts(prefill)}
    works = [(kind, count) for kind, of in counts.items() for count in of]
    sizes = replace(MIXTURE, layers=layers, experts=128, vocabulary=vocabulary, context=max(8192, *counts["prefill"]))
    sizes = sizes if layers else TINY
    options = {"threads": threads, "gpu": gpu, "bench": llama_bench, "rounds": rounds, "timeout": timeout}
    names = placements.split(",")
    with tempfile.TemporaryDirectory() as folder:
        path = model or Path(folder, "model.gguf")
        if not path.exists():
            write_gguf(path, sizes, types, 0)
        SAYS.print(f"{path.stat().st_size / 1e6:,.0f} MB of file")
        results = measure(path, names, works, options)
        results["memory_rate"] = memory_rate(threads)
        SAYS.print(f"{threads} threads read {results['memory_rate'] / 1e9:.1f} GB/s")
        checks = show(results, names, works, path, sizes)
    for check in checks:
        SAYS.print(f"{verdict(check)}: {check}", markup=False)
    if json_file:
        speeds = [(*who, *work, speed) for who, of in results["speeds"].items() for work, speed in of.items()]
        json_file.write_text(json.dumps(results | {"speeds": speeds}))


if __name__ == "__main__":
    main()
