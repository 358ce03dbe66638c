"""Models cut in the middle over two hosts of one core each, against the same cut over two devices of one process.

python apps/bench/cluster_bench/cluster_models.py bert             # of the model zoo, or a path of an ONNX file
python apps/bench/cluster_bench/cluster_models.py bert resnet50 --calls 32 --rounds 9
python apps/bench/cluster_bench/cluster_models.py resnet50 --replicas 2   # whole, against as many plain processes

The model is cut at half of its nodes. Both run the same calls in turns, 16 of them in flight; results
must be equal bit for bit before anything is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TVM_NUM_THREADS"] = "1"
os.environ.setdefault("TVM_BIND_THREADS", "0")

import click  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from rich.console import Console  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_zoo import model_path, random_inputs  # noqa: E402
from smoke import smoke  # noqa: E402

import relax_hetero as rh  # noqa: E402

console = Console()


def cut_in_the_middle(path: Path, vdevices: list[Any], second: str) -> Any:
    """The model with the second half of its nodes on the device `second`."""
    model = onnx.load(path)
    for index, node in enumerate(model.graph.node):
        node.name = f"{'first' if 2 * index < len(model.graph.node) else 'second'}/{index}"
    return rh.from_onnx(model, vdevices=vdevices, placement={"second/*": second})


def one_core() -> dict[str, Any]:
    """This CPU with one core."""
    target = {**rh.native("llvm").export(), "num-cores": 1}
    return {key: value for key, value in target.items() if key != "tag"}


@click.command()
@click.argument("models", nargs=-1)
@click.option("--calls", default=32, show_default=True, help="Calls of a turn.")
@click.option("--in-flight", default=16, show_default=True, help="Calls under way at once.")
@click.option("--rounds", default=7, show_default=True, help="Turns of each contestant.")
@click.option("--replicas", default=0, help="Time replicas of the whole model on one host, and as many processes.")
@click.option("--seconds", default=8.0, show_default=True, help="With --replicas, seconds of each side.")
@smoke(models=("mobilenet_v2",), calls=2, in_flight=2, rounds=1)
def main(models: tuple[str, ...], calls: int, in_flight: int, rounds: int, replicas: int, seconds: float) -> None:
    """Throughput of MODELS (bert by default) over two hosts and over two devices of one process."""
    import ray

    # Processes of Ray find this library.
    here = str(Path(rh.__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        for name in models or ("bert",):
            if replicas:
                compare_replicas(name, replicas, seconds)
            else:
                compare(name, calls, in_flight, rounds)
    finally:
        ray.shutdown()


def compare(name: str, calls: int, in_flight: int, rounds: int) -> None:
    """Time one model, and print a line."""
    path = model_path(name)
    inputs = random_inputs(path, {}, 0)
    machine = rh.vm.VirtualMachine(
        rh.compile(cut_in_the_middle(path, [one_core(), one_core()], "llvm:1")), max_in_flight=in_flight
    )
    hosts = {"a": {"num_cpus": 1}, "b": {"num_cpus": 1}}
    over_hosts = cut_in_the_middle(path, ["a/llvm", "b/llvm"], "b/llvm")
    with rh.cluster.Cluster(over_hosts, hosts, in_flight=in_flight) as cluster:
        for ours, theirs in zip(_flat(cluster["main"](**inputs)), _flat(machine["main"](**inputs)), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        contestants: dict[str, Callable[..., Any]] = {"two hosts": cluster.submit, "one process": machine.submit}
        seconds: dict[str, list[float]] = {peer: [] for peer in contestants}
        for turn in range(rounds):
            for peer in sorted(contestants, key=lambda peer: (peer == "one process") != bool(turn % 2)):
                seconds[peer].append(timed(contestants[peer], inputs, calls))
        rates = {peer: calls / statistics.median(turn_seconds) for peer, turn_seconds in seconds.items()}
        ratio = rates["two hosts"] / rates["one process"]
        text = ", ".join(f"{peer} {rate:.1f}/s" for peer, rate in rates.items())
        console.print(f"{name}, {in_flight} calls in flight: {text}; {ratio:.2f} of the process's throughput")


def compare_replicas(name: str, replicas: int, seconds: float) -> None:
    """Time replicas of a whole model under load, then as many plain processes, and print a line."""
    path = model_path(name)
    inputs = random_inputs(path, {}, 0)
    mod = rh.from_onnx(str(path), vdevices=["a/llvm"])
    with rh.cluster.Cluster(mod, {"a": {"num_cpus": 1}}, replicas=replicas, in_flight=4) as cluster:
        for _ in range(3 * replicas):
            cluster["main"](**inputs)
        begin, fences = time.perf_counter(), []
        while time.perf_counter() < begin + seconds:
            fences.append(cluster.submit("main", **inputs))
        for fence in fences:
            fence.result()
        ours = len(fences) / (time.perf_counter() - begin)
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(replicas)
    with context.Pool(replicas, initializer=_share, initargs=(start,)) as pool:
        theirs = sum(pool.starmap(plain_rate, [(str(path), seconds)] * replicas, chunksize=1))
    text = f"{replicas} replicas {ours:.1f}/s, as many processes {theirs:.1f}/s"
    console.print(f"{name}, whole: {text}; {ours / theirs:.2f} of the processes' throughput")


def _share(start: Any) -> None:
    globals()["_start"] = start


def plain_rate(path: str, seconds: float) -> float:
    """Calls per second of a process that runs a model on one core and begins with the other processes."""
    inputs = random_inputs(path, {}, 0)
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(path, vdevices=[one_core()])))
    for _ in range(3):
        machine["main"](**inputs)
    globals()["_start"].wait()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        machine["main"](**inputs)
        count += 1
    return count / (time.perf_counter() - begin)


def timed(submit: Callable[..., Any], inputs: dict[str, np.ndarray], calls: int) -> float:
    """Seconds of some calls."""
    begin = time.perf_counter()
    for fence in [submit("main", **inputs) for _ in range(calls)]:
        fence.result()
    return time.perf_counter() - begin


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


if __name__ == "__main__":
    main()
