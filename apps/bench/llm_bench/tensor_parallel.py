"""A random llama of 8 billion weights on one GPU and over several: decode steps and prefill by the same functions.

python apps/bench/llm_bench/tensor_parallel.py                              # F16 on one and two GPUs: 16 GB of weights
python apps/bench/llm_bench/tensor_parallel.py --vdevice llvm --layers 0    # a tiny model over CPU devices

The model is loaded by `rh.llm.load` with ``tensor_parallel=`` 1, then `--devices`, and called as an engine calls it for
greedy texts, by the host's clock: `prefill`, to logits in the host's memory, and decode steps, of which each begins
before the tokens of the last one are read. Rows of weights are random, but repeat, which saves time to write the file.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, verdict  # noqa: E402
from smoke import smoke  # noqa: E402
from turns import take_turns  # noqa: E402

from llm_bench import random_gguf  # noqa: E402
from llm_bench.loaded_model import LoadedModel  # noqa: E402
from llm_bench.random_gguf import LLAMA_8B, QWEN3_30B, Sizes, write_gguf  # noqa: E402
from relax_hetero.llm.calibrate import STEPS  # noqa: E402

BARS = {"decode 1": 1.6, "decode 32": 1.75, "prefill": 1.8}
"""Minimum speeds over one GPU; those of a mixture of experts are `MIXTURE_BAR`."""
MIXTURE_BAR = 1.5
DISTINCT_ROWS = 1021


@click.command(help=__doc__)
@click.option("--vdevice", default="cuda", show_default=True)
@click.option("--devices", default=2, show_default=True, help="Devices of the mesh.")
@click.option("--mixture", is_flag=True, help="A mixture of experts, like Qwen 3 30B-A3B, in place of the llama.")
@click.option("--layers", default=32, show_default=True, help="Layers; 0: a tiny llama.")
@click.option("--kind", default="F16", show_default=True, help="Type of the matrices.")
@click.option("--batches", default="1,32", show_default=True, help="Numbers of sequences of decode steps, a list.")
@click.option("--chunk", default=2048, show_default=True, help="Tokens of a prefill.")
@click.option("--context", default=512, show_default=True, help="Tokens of a sequence in a decode step.")
@click.option("--rounds", default=7, show_default=True)
@smoke(vdevice="llvm", layers=0, batches="1", chunk=32, context=40, rounds=1)
def main(
    vdevice: str,
    devices: int,
    mixture: bool,
    layers: int,
    kind: str,
    batches: str,
    chunk: int,
    context: int,
    rounds: int,
) -> None:
    """Time decode steps and prefill."""
    random_gguf.RANDOM_ROWS = DISTINCT_ROWS
    sizes = replace(QWEN3_30B if mixture else LLAMA_8B, layers=layers) if layers else Sizes()
    counts = tuple(map(int, batches.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder, "model.gguf"), sizes, kind, 0)
        times: dict[int, dict[str, float]] = {}
        logits = []
        for count in (1, devices):
            model = LoadedModel(path, [vdevice], None, context, counts, (chunk,), tensor_parallel=count)
            print(f"{count} devices: loaded in {model.seconds:.1f} s", flush=True)
            calls = {f"decode {batch}": model.step(batch) for batch in counts}
            for call in calls.values():
                call()
            timings = take_turns(calls, rounds)
            calls["prefill"] = model.prefill(chunk)  # overwrites the first sequence
            logits.append(np.array(calls["prefill"]()))
            timings |= take_turns({"prefill": calls["prefill"]}, rounds)
            steps = {name: 1 if name == "prefill" else STEPS for name in calls}
            times[count] = {name: timing.median * 1e3 / steps[name] for name, timing in timings.items()}
            for name, ms in times[count].items():
                print(f"  {name}: {ms:.3f} ms", flush=True)
            del model, calls, call
            gc.collect()
        error = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
        print(f"difference of the prefill's logits: {error:.2g} of the largest one")
        for name, ms in times[1].items():
            bar = MIXTURE_BAR if mixture and name.startswith("decode") else BARS.get(name)
            ratio = ms / times[devices][name]
            if bar is None:
                print(f"{name}: {ratio:.3f} of one device")
            else:
                print(f"{verdict(Check(f'{name}: speed over one device', ratio, bar))}: {name}: {ratio:.3f}, bar {bar}")


if __name__ == "__main__":
    main()
