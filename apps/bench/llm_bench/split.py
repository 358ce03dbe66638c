"""A language model split by layers over two devices, and on each of them: milliseconds of a decoded token.

python apps/bench/llm_bench/split.py --layers 12                      # random weights in 4 bits, a CPU and a GPU
python apps/bench/llm_bench/split.py --vdevice llvm --vdevice llvm    # two CPU devices

Embeddings and the first layers are on the first device, the others and the logits on the second. A token of the split
model should take the sum of its parts: the time of a token on each device alone, times that device's share of the
weights.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

import relax_hetero as rh

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from bars import Check, verdict  # noqa: E402
from random_gguf import FOUR_BITS, TINYLLAMA, Sizes, write_gguf  # noqa: E402
from smoke import smoke  # noqa: E402

BAR = 1.10
PROMPT, CHUNK = 48, 64
SAYS = Console(highlight=False, width=120)


class Contestant:
    """A model on its devices, with one sequence."""

    def __init__(self, path: Path, vdevices: list[str], placement: dict[str, str] | None) -> None:
        self._model, _ = rh.llm.load(path, vdevices, placement, batches=(1,), chunks=(CHUNK,), context=512)
        self._slot = self._model.cache.add()

    def tokens(self, count: int) -> list[int]:
        """Greedy tokens after a prompt."""
        self._model.cache.truncate(self._slot, 0)
        following = int(self._model.prefill(self._slot, np.arange(1, PROMPT + 1, dtype="int32")).argmax())
        new_tokens = []
        for _ in range(count):
            new_tokens.append(following)
            following = int(self._model.decode([self._slot], [following])[0].argmax())
        return new_tokens

    def milliseconds(self, count: int) -> float:
        """Mean milliseconds of `count` tokens after a prompt."""
        self._model.cache.truncate(self._slot, 0)
        self._model.prefill(self._slot, np.arange(1, PROMPT + 1, dtype="int32"))
        begin = time.perf_counter()
        for token in range(count):
            self._model.decode([self._slot], [token + 1])
        return (time.perf_counter() - begin) * 1e3 / count


def shares(path: Path, first: int) -> tuple[float, float]:
    """Shares of the first layers, and of all others, in the bytes of weights that a token reads."""
    layers = {f"blk.{layer}" for layer in range(first)}
    sizes = {True: 0, False: 0}
    for tensor in gguf.GGUFReader(path).tensors:
        if not tensor.name.startswith("token_embd"):
            sizes[".".join(tensor.name.split(".")[:2]) in layers] += int(tensor.n_bytes)
    total = sum(sizes.values())
    return sizes[True] / total, sizes[False] / total


def contestants(path: Path, vdevices: tuple[str, ...], first: int) -> dict[str, Contestant]:
    """The model on each device alone, and split."""
    names = [f"{name}:{vdevices[:index].count(name)}" for index, name in enumerate(vdevices)]
    placement = {"token_embd*": names[0], **{f"blk.{layer}.*": names[0] for layer in range(first)}, "*": names[1]}
    models: dict[str, Any] = {}
    for name, devices, rules in [
        *((name, [device], None) for name, device in zip(names, vdevices, strict=True)),
        ("split", list(vdevices), placement),
    ]:
        begin = time.perf_counter()
        models[name] = Contestant(path, devices, rules)
        SAYS.print(f"{name}: compiled in {time.perf_counter() - begin:.0f} s")
    return models


@click.command(help=__doc__)
@click.option("--vdevice", "vdevices", multiple=True, default=("llvm", "cuda"), show_default=True, help="Two devices.")
@click.option("--layers", default=TINYLLAMA.layers, show_default=True)
@click.option("--first", type=int, help="Layers on the first device; half of them by default.")
@click.option("--tokens", default=32, show_default=True, help="Tokens of a turn.")
@click.option("--rounds", default=7, show_default=True)
@smoke(vdevices=("llvm", "llvm"), layers=2, first=1, tokens=3, rounds=1)
def main(vdevices: tuple[str, ...], layers: int, first: int | None, tokens: int, rounds: int) -> None:
    """Compare the models."""
    if len(vdevices) != 2:
        raise click.BadParameter(f"found {len(vdevices)} devices, expected two", param_hint="--vdevice")
    sizes = Sizes() if layers == 2 else replace(TINYLLAMA, layers=layers)
    first = layers // 2 if first is None else first
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(path, sizes, FOUR_BITS, 0)
        models = contestants(path, vdevices, first)
        parts = shares(path, first)
    texts = {name: model.tokens(tokens) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(model.milliseconds(tokens))
    show(texts, {name: statistics.median(turn_times) for name, turn_times in times.items()}, parts)


def show(texts: dict[str, list[int]], times: dict[str, float], parts: tuple[float, float]) -> None:
    """Print a table; exits with 1 if the bar is missed."""
    table = Table(title="milliseconds of a decoded token")
    for column in ("", "ms", "share of the split model", "tokens as when split"):
        table.add_column(column, justify="right")
    *single_devices, split = times
    for name, share in zip(single_devices, parts, strict=True):
        same = sum(a == b for a, b in zip(texts[name], texts[split], strict=True))
        table.add_row(name, f"{times[name]:.2f}", f"{share:.2f}", f"{same} of {len(texts[split])}")
    expected = sum(times[name] * share for name, share in zip(single_devices, parts, strict=True))
    table.add_row(split, f"{times[split]:.2f}", "", "")
    SAYS.print(table)
    check = Check("a split token over the sum of its parts", times[split] / expected, BAR, at_most=True)
    SAYS.print(f"{verdict(check)}: {check}", markup=False)
    if not check.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
