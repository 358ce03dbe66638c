"""A random llama of 8 billion weights from a GGUF file on an NVIDIA GPU: decode and prefill, against PyTorch in f16.

python apps/bench/llm_bench/gpu_model.py                                    # Q4_0 and F16: 21 GB of files, 80 GB of GPU
python apps/bench/llm_bench/gpu_model.py --layers 8 --types Q4_0,Q4_K,F16   # shorter

Each file is written with random weights, loaded by `rh.llm.load` with its defaults, and called as an engine calls it
for greedy texts, by the host's clock: `prefill`, to logits in the host's memory, and decode steps, of which each begins
before the tokens of the last one are read (`begin_decode`). PyTorch runs a model of the same sizes in float16 as CUDA
graphs, with the argmax in them, by the same clock. Bytes of a decode step are the file's weights and the cache; the
bandwidth is measured by reading 4 GB once, the peak by a product of 8,192 x 8,192 x 8,192 in cuBLAS, in the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tvm  # noqa: E402
from bars import Check, verdict  # noqa: E402
from gpu_bench.device_time import Clock, microseconds, torch_on_gpu  # noqa: E402 (the folder comes first)
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from smoke import smoke  # noqa: E402
from turns import take_turns  # noqa: E402

from llm_bench.loaded_model import Call, LoadedModel  # noqa: E402
from llm_bench.random_gguf import LLAMA_8B, SCALES, Sizes, shapes, write_gguf  # noqa: E402
from llm_bench.torch_llama import TorchLlama  # noqa: E402
from relax_hetero.llm.calibrate import STEPS  # noqa: E402

BANDWIDTH_BARS, PEAK_BAR = {True: 0.60, False: 0.80}, 0.70
"""Minimum shares of the bandwidth, for block-quantized and other weights, and of the peak."""
PEER_BARS = {True: 2.0, False: 1.10}
BLOCK_QUANTIZED = {kind.name for kind in SCALES}
"""Names of types of block-quantized weights."""


def references(rounds: int) -> dict[str, float]:
    """Bytes read per millisecond, and operations of f16 products per millisecond; none without a GPU."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").view(torch.int64)
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device="cuda") for _ in range(2))
    us = microseconds(Clock.of(tvm.cuda(0)), {"read": lambda: source.sum(), "product": lambda: a @ b}, rounds)
    return {"read": source.numel() * 8e3 / us["read"], "peak": 2e3 * 8192**3 / us["product"]}


def operations(sizes: Sizes, rows: int) -> float:
    """Operations of a prefill that computes the last row's logits: products and causal attention."""
    layer = sum(np.prod(shape) for name, shape in shapes(sizes).items() if name.startswith("blk.0.") and len(shape) > 1)
    attention = 2 * sizes.heads * sizes.size * rows * (rows + 1)
    return float(2 * rows * sizes.layers * layer + sizes.layers * attention + 2 * sizes.width * sizes.vocabulary)


def bytes_read(path: Path, sizes: Sizes, batch: int, context: int) -> float:
    """Bytes of a decode step: the file's weights except the embedding table, and keys and values of 16 bits."""
    import gguf

    weights = sum(int(one.n_bytes) for one in gguf.GGUFReader(path).tensors if one.name != "token_embd.weight")
    return weights + batch * context * 4.0 * sizes.layers * sizes.kv_heads * sizes.size


@click.command(help=__doc__)
@click.option("--vdevice", default="cuda", show_default=True)
@click.option("--layers", default=LLAMA_8B.layers, show_default=True)
@click.option("--types", default="Q4_0,F16", show_default=True, help="Types of the matrices, a list.")
@click.option("--batches", default="1,8,32", show_default=True, help="Numbers of sequences of decode steps, a list.")
@click.option("--chunk", default=2048, show_default=True, help="Tokens of a prefill.")
@click.option("--context", default=512, show_default=True, help="Tokens of a sequence in a decode step.")
@click.option("--batch-invariant", is_flag=True, help="Load the model with the same bits in every batch.")
@click.option("--rounds", default=11, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Append JSON lines to this file.")
@smoke(vdevice="llvm", layers=0, types="Q4_0", batches="1,2", chunk=70, context=100, rounds=1)
def main(
    vdevice: str,
    layers: int,
    types: str,
    batches: str,
    chunk: int,
    context: int,
    batch_invariant: bool,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Time decode steps and prefill."""
    console = Console(highlight=False, width=150)
    sizes, counts = replace(LLAMA_8B, layers=layers) if layers else Sizes(), tuple(map(int, batches.split(",")))
    calls: dict[str, dict[str, Call]] = {}
    read: dict[tuple[str, str], float] = {}
    for kind in types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = write_gguf(Path(folder, "model.gguf"), sizes, kind, 0)
            sizes_of_calls = {"batches": counts, "chunks": (chunk,), "batch_invariant": batch_invariant}
            ours = LoadedModel(path, [vdevice], None, context, **sizes_of_calls)
            for batch in counts:
                read[f"decode {batch}", kind] = bytes_read(path, sizes, batch, context)
        console.print(f"{kind}: loaded in {ours.seconds:.1f} s")
        for batch in counts:
            calls.setdefault(f"decode {batch}", {})[kind] = ours.step(batch)
        calls.setdefault(f"prefill {chunk}", {})[kind] = ours.prefill(chunk)
    if torch_on_gpu() is not None and vdevice.startswith("cuda"):
        peer, clock = TorchLlama(sizes), Clock.of(tvm.cuda(0))
        for batch in counts:
            calls[f"decode {batch}"]["torch"] = peer.step(clock, batch, context)
            read[f"decode {batch}", "torch"] = peer.bytes_read(batch, context)
        calls[f"prefill {chunk}"]["torch"] = peer.prefill(clock, chunk)
    limits = references(rounds)
    times = {}
    for work, each in calls.items():
        for name, call in each.items():
            assert np.isfinite(np.asarray(call())).all(), f"{work}, {name}: logits are not finite"
        count = STEPS if work.startswith("decode") else 1
        times |= {(work, name): timing.median * 1e3 / count for name, timing in take_turns(each, rounds).items()}
    table = Table(title=f"{sizes.layers} layers of {sizes.width}, context {context}", title_justify="left")
    for column in ("work", "by", "ms", "tokens/s", "TB/s or TFLOP/s", "share", "over torch"):
        table.add_column(column, justify="left" if column in ("work", "by") else "right")
    checks = []
    for (work, name), ms in times.items():
        kind, rows = work.split()[0], int(work.split()[1])
        is_blocks = name in BLOCK_QUANTIZED
        amount = read[work, name] if kind == "decode" else operations(sizes, rows)
        limit = limits.get("read" if kind == "decode" else "peak")
        share = amount / ms / limit if limit else None
        over = times[work, "torch"] / ms if (work, "torch") in times and name != "torch" else None
        cells = [f"{ms:.3f}", f"{rows / ms * 1e3:,.0f}", f"{amount / ms / 1e9:.2f}"]
        table.add_row(work, name, *cells, f"{share:.2f}" if share else "", f"{over:.2f}" if over else "")
        if share and name != "torch" and (kind == "prefill" or rows == 1):
            bar = PEAK_BAR if kind == "prefill" else BANDWIDTH_BARS[is_blocks]
            limit_name = "peak" if kind == "prefill" else "bandwidth"
            checks.append(Check(f"{work}, {name}: share of the {limit_name}", share, bar))
        if over and kind == "decode":
            checks.append(Check(f"{work}, {name}, over torch", over, PEER_BARS[is_blocks]))
        if json_file:
            with json_file.open("a") as lines:
                lines.write(json.dumps({"work": work, "by": name, "ms": ms, "share": share, "ratio": over}) + "\n")
    console.print(table)
    if limits:
        console.print(f"read {limits['read'] / 1e9:.2f} TB/s, peak {limits['peak'] / 1e9:.0f} TFLOP/s")
    for check in checks:
        console.print(f"{verdict(check)}: {check}", markup=False)


if __name__ == "__main__":
    main()
