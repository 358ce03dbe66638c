"""One program of each family of kernels under compute-sanitizer: ``python tests/python/gpu/under_sanitizer.py``.

Memory errors (memcheck), races in shared memory (racecheck) and wrong barriers (synccheck) are findings, and so are
wrong numbers. Programs are small, because the sanitizer is a hundred times slower, and run side by side, each once
before without it: then it finds compiled kernels in a cache. Exits with 1 if something was found, with 2 where
compute-sanitizer or a GPU is missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [str(ROOT / "python"), str(ROOT / "tests" / "python")]
sys.path[:0] = FOLDERS

TOOLS = ("memcheck", "racecheck", "synccheck")
PRODUCTS = {
    "f16": "200x192x136", "bf16": "130x256x264", "f32": "67x129x95", "tf32": "96x160x136", "s8": "128x256x96",
    "e4m3": "128x256x96", "f16 of one row": "1x512x384", "f16 of 16 rows": "16x512x384", "f16 in batches": "3*40x64x48",
    "f16 odd": "127x255x101", "q4": "1x512x256",
}  # fmt: skip
ROWS = {
    "chain": (64, 300),
    "softmax": (33, 1000),
    "layer norm": (40, 1024),
    "transpose": (130, 200),
    "reduction": (65, 999),
}
CONVOLUTIONS = {
    "f16 convolution": (14, 64, 72, 3, 1, 2, "f16"),
    "f16 convolution of an image": (20, 3, 40, 7, 2, 1, "f16"),
    "f32 convolution": (9, 20, 24, 3, 2, 1, "f32"),
}
LANGUAGE = ("Q4_0", "Q4_K", "Q6_K", "F16", "Q3_K", "IQ4_XS")
ATTENTION = {
    "attention": (2, 130, 130, 64, True, "float16", 2),
    "attention of few queries": (2, 3, 700, 128, False, "float16", 2),
}


def programs() -> dict[str, Callable[[str], float]]:
    """Programs by name: each runs for a target and returns its error divided by the allowed one."""
    from gpu.test_models import MAKERS

    sys.path.append(str(ROOT / "apps" / "bench"))  # its module `models` is not the tests' one
    from gpu_attention import wanted as numbers_of_attention
    from gpu_bench.convolutions import Convolutions
    from gpu_bench.convolutions import wanted as numbers_of_convolutions
    from gpu_bench.programs import error_of, parsed_gpu
    from gpu_bench.workloads import KINDS, Attentions, Products, Rows, Workload
    from gpu_few_rows import wanted as numbers_of_products
    from gpu_memory_bound import wanted as numbers_of_rows
    from peers.shape import Shape

    import relax_hetero as rh

    def run(work: Workload, reference: Callable[[Workload], list[np.ndarray]], allowed: float, gpu: str) -> float:
        result = rh.vm.VirtualMachine(rh.compile(work.module(parsed_gpu(gpu))))["main"](*work.inputs())
        actual = [tensor.numpy() for tensor in result]
        return max(error_of(ours, right) for ours, right in zip(actual, reference(work), strict=True)) / allowed

    def product(name: str, gpu: str) -> float:
        kind = name.partition(" ")[0]
        work = Products(Shape.parse(PRODUCTS[name]), kind, count=2)
        expected = _batched if work.shape.batch else numbers_of_products
        return run(work, expected, max(KINDS.get(kind, KINDS["f16"]).allowed, 1e-6), gpu)

    def rows(name: str, gpu: str) -> float:
        return run(Rows(name, *ROWS[name], "float32", 2), numbers_of_rows, 1e-4, gpu)

    def convolution(name: str, gpu: str) -> float:
        work = Convolutions(*CONVOLUTIONS[name], count=2)
        return run(work, numbers_of_convolutions, KINDS[work.kind].allowed, gpu)

    def attention(name: str, gpu: str) -> float:
        return run(Attentions(*ATTENTION[name]), numbers_of_attention, 2e-3, gpu)

    def model(make: Callable[..., None], gpu: str) -> float:
        from gpu.test_models import Build, results

        build = Build()
        make(build)
        pairs = zip(results(build, [parsed_gpu(gpu)], None), results(build, ["llvm"], None), strict=True)
        return max((error_of(ours, right) for ours, right in pairs if right.size), default=0.0) / 1e-3

    def language_model(types: str, gpu: str) -> float:
        from gpu.test_real_widths import MODELS, TOLERANCE, loaded, text, tokens, write_gguf

        # Products of every width and depth of a layer, with fewer words.
        sizes = replace(MODELS["llama-1.1b"], layers=1, vocabulary=300)
        with tempfile.TemporaryDirectory() as folder:
            path = write_gguf(Path(folder, "model.gguf"), sizes, types)
            prompt = tokens(9, vocabulary=300)
            expected = text(loaded(path, ["llvm"]), prompt, 2)
            actual = text(loaded(path, [parsed_gpu(gpu)], batches=(1, 2)), prompt, 2, expected.argmax(1))
        return float(np.abs(actual - expected).max() / np.abs(expected).max() / TOLERANCE)

    by_name: dict[str, Callable[[str], float]] = {name: lambda gpu, name=name: product(name, gpu) for name in PRODUCTS}
    by_name |= {name: lambda gpu, name=name: rows(name, gpu) for name in ROWS}
    by_name |= {name: lambda gpu, name=name: convolution(name, gpu) for name in CONVOLUTIONS}
    by_name |= {name: lambda gpu, name=name: attention(name, gpu) for name in ATTENTION}
    by_name |= {f"language model in {types}": lambda gpu, types=types: language_model(types, gpu) for types in LANGUAGE}
    return by_name | {make.__name__: lambda gpu, make=make: model(make, gpu) for make in MAKERS}


def has_gpu() -> bool:
    """True if programs for a GPU can run."""
    import tvm

    return bool(tvm.cuda(0).exist)


def _batched(work: object) -> list[np.ndarray]:
    arrays = [array.astype("float32") for array in work.inputs()]
    return [x @ w for x, w in zip(arrays[: work.count], arrays[work.count :], strict=True)]


def check(tool: str, name: str, gpu: str, limit: float, cache: str) -> tuple[str, str, str, float]:
    """One program in a process of the tool: what was found, empty for nothing."""
    begin = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), "--run", name, "--gpu", gpu]
    if tool != "none":
        # Asking for an entry point that a driver does not have is an error of the interface, of which memcheck tells.
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            *quiet,
            "--error-exitcode",
            "99",
            "--print-limit",
            "5",
            *command,
        ]
    path = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    settings = {**os.environ, "PYTHONPATH": path, "RELAX_HETERO_CACHE": cache, "TVM_NUM_THREADS": "2"}
    try:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=limit)
        finding = "" if done.returncode == 0 else f"status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    except subprocess.TimeoutExpired:
        finding = f"no end within {limit:g} s"
    return tool, name, finding, time.monotonic() - begin


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), help="some of memcheck, racecheck, synccheck, none")
    parser.add_argument("--names", default="", help="programs, by commas; else all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each program and tool")
    parser.add_argument("--gpu", default="cuda", help="target; llvm with --tools none has a CPU stand for the GPU")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        error = programs()[options.run](options.gpu)
        print(f"error {error:.3g} of what is allowed")
        return 0 if error <= 1 else 1
    tools = options.tools.split(",")
    if tools != ["none"] and not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not installed")
        return 2
    if options.gpu != "llvm" and not has_gpu():
        print("no NVIDIA GPU is here: --gpu llvm --tools none has a CPU stand for it")
        return 2
    names = options.names.split(",") if options.names else list(programs())
    count = runs = 0
    with tempfile.TemporaryDirectory() as cache, concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for batch in (["none"], [tool for tool in tools if tool != "none"]):
            jobs = [
                pool.submit(check, tool, name, options.gpu, options.limit, cache) for tool in batch for name in names
            ]
            for job in concurrent.futures.as_completed(jobs):
                tool, name, finding, seconds = job.result()
                count += bool(finding)
                print(f"{tool}, {name}, {seconds:.0f} s: {finding or 'nothing found'}", flush=True)
            runs += len(jobs)
    print(f"{count} findings in {runs} runs")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
