"""Calls while other processes are busy: a product of some 30 us, and whole models, against ONNX Runtime.

python apps/bench/busy_machine.py                         # the product alone, on an idle machine and a busy one
python apps/bench/busy_machine.py squeezenet.onnx --busy 2 --threads 2
python apps/bench/busy_machine.py --pause 1               # a millisecond between two calls
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from model_zoo import random_inputs

import relax_hetero as rh
from relax_hetero.target.cpu_cores import num_cores

# Seconds after which the threads of the library that was called before sleep.
_REST = 0.02
_BURN = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(100_000): pass"


def product(path: Path, size: int = 512, rows: int = 24) -> None:
    """Write a model that multiplies by a weight: 30 us on two cores of a Zen 5."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((size, size), "float32"), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, size)) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "product", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that only compute, while a ``with`` block lasts."""
    code = _BURN.format(parent=os.getpid())
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        if processes:
            time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def calls_of(path: Path, threads: int) -> dict[str, Callable[[], object]]:
    """Calls of a model by library, which were checked to give the same numbers."""
    import onnxruntime

    inputs = random_inputs(path, {}, 1)
    target = {**rh.native("llvm").export(), "num-cores": threads}
    module = rh.from_onnx(str(path), [target], shapes={name: list(array.shape) for name, array in inputs.items()})
    main = rh.vm.VirtualMachine(rh.compile(module))["main"]
    arrays = list(inputs.values())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    results = main(*arrays)
    ours = results[0] if isinstance(results, tuple) else results
    theirs = session.run(None, inputs)[0]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-2, atol=1e-3)
    return {"relax-hetero": lambda: main(*arrays), "ONNX Runtime": lambda: session.run(None, inputs)}


def measure(calls: dict[str, Callable[[], object]], seconds: float, pause: float, turns: int) -> dict[str, list[float]]:
    """Seconds that each call took; the libraries take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in sorted(calls, reverse=turn % 2 == 1):
            time.sleep(_REST)
            until = time.perf_counter() + seconds / turns
            calls[name]()
            while time.perf_counter() < until or len(times[name]) <= turn:
                start = time.perf_counter()
                calls[name]()
                times[name].append(time.perf_counter() - start)
                if pause:
                    time.sleep(pause)
    return times


def text(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main(arguments: list[str] | None = None) -> None:
    """Print a table of both libraries: the median, and the 90th percentile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="ONNX files, measured after the product")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--busy", type=int, default=num_cores(), help="busy processes (default: as many as cores)")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of each measurement")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0, help="milliseconds between two calls")
    options = parser.parse_args(arguments)
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    print(f"| model | busy processes | {' | '.join(f'{n}: median, 90 %' for n in ('ours', 'ONNX Runtime'))} | ratio |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "product.onnx")
        product(small)
        for path in (small, *options.models):
            calls = calls_of(path, options.threads)
            for busy in dict.fromkeys((0, options.busy)):
                with busy_processes(busy):
                    times = measure(calls, options.seconds, options.pause / 1e3, options.turns)
                ours, theirs = times.values()
                tails = [statistics.quantiles(t, n=10)[-1] if len(t) > 1 else t[0] for t in (ours, theirs)]
                medians = [statistics.median(t) for t in (ours, theirs)]
                cells = " | ".join(f"{text(m)}, {text(tail)}" for m, tail in zip(medians, tails, strict=True))
                print(f"| {path.stem} | {busy} | {cells} | {medians[0] / medians[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
