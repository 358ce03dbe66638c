"""A random llama-shaped model on an NVIDIA GPU, f16 and 4 bits: decode steps and prefill, beside PyTorch in f16.

python apps/bench/llm_bench/gpu_model.py                              # 8 B: 32 layers of 4,096, on a GPU of 80 GB
python apps/bench/llm_bench/gpu_model.py --layers 4 --bits 4          # shorter

Weights are made on the GPU. A decode step gives each sequence of a batch its next token, behind `--context` tokens of
its cache; it and a prefill of one sequence are one CUDA graph each. Bandwidth is that of reading 4 GB once, and the
peak that of a product of 8,192 x 8,192 x 8,192 by cuBLAS, in the same run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, verdict  # noqa: E402
from gpu_bench.device_time import Clock, Launch, microseconds, torch_on_gpu  # noqa: E402 (the folder comes first)
from gpu_bench.programs import device_of, parsed_gpu  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from smoke import smoke  # noqa: E402

import relax_hetero as rh  # noqa: E402
from llm_bench.llama_module import BLOCK, Functions, LlamaModule, compiled, with_random_weights  # noqa: E402
from llm_bench.llama_shape import SMALL, LlamaShape  # noqa: E402
from llm_bench.torch_llama import TorchLlama  # noqa: E402
from relax_hetero.encoding.pages import page_shape  # noqa: E402

BANDWIDTH_BAR, PEAK_BAR = 0.80, 0.70
PEER_BARS = {16: 1.10, 4: 2.0}


def random_tensor(device: Any) -> Callable[[list[int], str], tvm.runtime.Tensor]:
    """Random weights on a device: by PyTorch where it has the GPU, else by numpy."""
    torch, generator = torch_on_gpu(), np.random.default_rng(0)

    def tensor(shape: list[int], dtype: str) -> tvm.runtime.Tensor:
        is_bits = dtype == "int32"
        # Packed weights end in the tiles' rows of k, and scales in a lane's two columns.
        scale = 2e-3 if shape[-1] == 2 else 0.015
        if torch is None:
            array = generator.integers(-(2**31), 2**31, shape) if is_bits else generator.standard_normal(shape) * scale
            return tvm.runtime.tensor(array.astype(dtype), device)
        kinds = {"dtype": getattr(torch, dtype), "device": "cuda"}
        if is_bits:
            return tvm.runtime.from_dlpack(torch.randint(-(2**31), 2**31, shape, **kinds))
        return tvm.runtime.from_dlpack(torch.empty(shape, **kinds).normal_(0, scale))

    return tensor


class Ours:
    """A compiled model on its device."""

    def __init__(self, shape: LlamaShape, functions: Functions, bits: int, gpu: Any) -> None:
        self.functions, device = functions, device_of(gpu)
        begin = time.perf_counter()
        executable = compiled(LlamaModule(shape, functions, bits, gpu))
        self.seconds = time.perf_counter() - begin
        machine = rh.vm.VirtualMachine(with_random_weights(executable, random_tensor(device)))
        self.machine, self.device, self.shape = machine, device, shape
        extents = page_shape(functions.pages, shape.kv_heads, shape.size)
        self.pages = [tvm.runtime.tensor(np.zeros(extents, "float16"), device) for _ in range(shape.layers)]
        table = np.arange(functions.pages, dtype="int32").reshape(functions.slots, functions.most_pages)
        self.table = tvm.runtime.tensor(table, device)

    def launch(self, name: str, rows: int, positions: np.ndarray, sequences: np.ndarray) -> Launch:
        """A launch of a function."""
        generator, function = np.random.default_rng(1), self.machine[name]
        tokens = generator.integers(0, self.shape.vocabulary, rows).astype("int32")
        given = [tvm.runtime.tensor(one.astype("int32"), self.device) for one in (tokens, positions, sequences)]

        def work() -> object:
            logits, *self.pages = function(*given, self.table, *self.pages)
            return logits

        logits = work().numpy()  # type: ignore[attr-defined]
        assert np.isfinite(logits).all() and logits.any(), f"{name}: logits are not finite, or all zero"
        return work

    def step(self, batch: int, context: int) -> Launch:
        """A launch of a decode step."""
        return self.launch(f"decode_{batch}", batch, np.full(batch, context - 1), np.arange(batch))

    def prefill(self, rows: int) -> Launch:
        """A launch of a prefill."""
        return self.launch(f"prefill_{rows}", rows, np.arange(rows), np.zeros(rows))


def references(clock: Clock, rounds: int) -> dict[str, float]:
    """Bytes read a microsecond, and operations of f16 products a microsecond; none without a GPU."""
    torch = torch_on_gpu()
    if torch is None or clock.stream is None:
        return {}
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").view(torch.int64)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device="cuda") for _ in range(2))
    us = microseconds(
        clock, {"read": lambda: source.sum(), "copy": lambda: target.copy_(source), "product": lambda: a @ b}, rounds
    )
    bytes_of = source.numel() * 8
    return {"read": bytes_of / us["read"], "copy": 2 * bytes_of / us["copy"], "peak": 2 * 8192**3 / us["product"]}


def weight_bytes(shape: LlamaShape, bits: int) -> float:
    """Of the weights that a token is multiplied by; of 4 bits with their scales."""
    return shape.weights * (2 if bits == 16 else 0.5 + 2 / BLOCK)


@click.command()
@click.option("--gpu", default="cuda", show_default=True, help="Target of the GPU.")
@click.option("--layers", default=32, show_default=True)
@click.option("--bits", default="16,4", show_default=True, help="Of a weight: a list.")
@click.option("--batches", default="1,8,32", show_default=True, help="Of decode steps: a list.")
@click.option("--chunk", default=2048, show_default=True, help="Tokens of a prefill.")
@click.option("--context", default=512, show_default=True, help="Tokens of a sequence in a decode step.")
@click.option("--rounds", default=11, show_default=True)
@click.option("--build-only", is_flag=True, help="Compile, and run nothing: needs no GPU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Append a line for each row there.")
@smoke(
    layers=2, batches="1,2", chunk=70, context=100, rounds=1, build_only=True, gpu='{"kind": "cuda", "arch": "sm_90a"}'
)
def main(
    gpu: str,
    layers: int,
    bits: str,
    batches: str,
    chunk: int,
    context: int,
    rounds: int,
    build_only: bool,
    json_file: Path | None,
) -> None:
    """Time decode steps and prefill of a random model on a GPU, here and in PyTorch."""
    target, console = parsed_gpu(gpu), Console(highlight=False, width=150)
    shape = SMALL if build_only and chunk < 128 else replace(LlamaShape(), layers=layers)
    sizes = tuple(map(int, batches.split(",")))
    functions = Functions(sizes, (chunk,), context)
    widths = [int(each) for each in bits.split(",")]
    if build_only:
        for width in widths:
            begin = time.perf_counter()
            compiled(LlamaModule(shape, functions, width, target))
            console.print(f"{width} bits: compiled in {time.perf_counter() - begin:.1f} s")
        return
    clock = Clock.of(device_of(target))
    with clock.current():
        known = references(clock, rounds)
        times = measured(shape, functions, widths, target, clock, rounds, console)
    report(shape, functions, widths, times, known, console, json_file)


def measured(
    shape: LlamaShape, functions: Functions, widths: list[int], target: Any, clock: Clock, rounds: int, console: Console
) -> dict[tuple[str, str], float]:
    """Microseconds by what is done and by whom."""
    launches: dict[str, dict[str, Launch]] = {}
    chunk = functions.chunks[0]
    for width in widths:
        ours = Ours(shape, functions, width, target)
        console.print(f"{width} bits: compiled in {ours.seconds:.1f} s")
        for batch in functions.batches:
            launches.setdefault(f"decode {batch}", {})[f"ours, {width} bits"] = ours.step(batch, functions.context)
        launches.setdefault(f"prefill {chunk}", {})[f"ours, {width} bits"] = ours.prefill(chunk)
    if torch_on_gpu() is not None:
        peer = TorchLlama(shape)
        for batch in functions.batches:
            launches[f"decode {batch}"]["torch"] = peer.step(clock, batch, functions.context)
        launches[f"prefill {chunk}"]["torch"] = peer.prefill(clock, chunk)
    found = {}
    for work, contestants in launches.items():
        for name, us in microseconds(clock, contestants, rounds).items():
            found[work, name] = us
            console.print(f"{work}, {name}: {us:.1f} µs")
    return found


def report(
    shape: LlamaShape,
    functions: Functions,
    widths: list[int],
    times: dict[tuple[str, str], float],
    known: dict[str, float],
    console: Console,
    json_file: Path | None,
) -> None:
    """A table, and the bars."""
    table = Table(title=f"{shape.weights / 1e9:.2f} B weights, context {functions.context}", title_justify="left")
    for column in ("work", "by", "ms", "tokens/s", "TB/s or TFLOP/s", "share", "over torch"):
        table.add_column(column, justify="left" if column in ("work", "by") else "right")
    checks = []
    for (work, name), us in times.items():
        kind, count = work.split()
        rows = int(count)
        peer = times.get((work, "torch"))
        width = 16 if name == "torch" else int(name.split()[1])
        if kind == "decode":
            done = weight_bytes(shape, width) + rows * shape.cache_bytes(functions.context)
            limit, bar = known.get("read"), BANDWIDTH_BAR
        else:
            done, limit, bar = shape.operations(rows), known.get("peak"), PEAK_BAR
        rate = done / us
        ratio = peer / us if peer and name != "torch" else None
        share = rate / limit if limit else None
        cells = [f"{us / 1e3:.3f}", f"{rows / us * 1e6:,.0f}", f"{rate / 1e6:.2f}"]
        table.add_row(work, name, *cells, f"{share:.2f}" if share else "", f"{ratio:.2f}" if ratio else "")
        if share and name != "torch" and (kind == "prefill" or rows == 1):
            checks.append(
                Check(f"{work}, {name}: share of the {'peak' if kind == 'prefill' else 'bandwidth'}", share, bar)
            )
        if ratio and kind == "decode":
            checks.append(Check(f"{work}, {name}, over torch", ratio, PEER_BARS[width]))
        if json_file:
            line = {"work": work, "by": name, "us": us, "share": share, "ratio": ratio}
            with json_file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
    console.print(table)
    if known:
        console.print(
            f"read {known['read'] / 1e6:.2f} TB/s, copy {known['copy'] / 1e6:.2f} TB/s, "
            f"peak {known['peak'] / 1e6:.0f} TFLOP/s"
        )
    for check in checks:
        console.print(f"{verdict(check)}: {check}", markup=False)


if __name__ == "__main__":
    main()
