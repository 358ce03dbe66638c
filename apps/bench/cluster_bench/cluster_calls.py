"""Calls over hosts compared with Ray alone, on one machine.

python apps/bench/cluster_bench/cluster_calls.py               # all parts; two cores
python apps/bench/cluster_bench/cluster_calls.py --part nodes  # one of them

- ``calls``: tensors of 200 KB through two hosts and back, against a bare compiled graph of two actors that forward
  their input, and one of two that compute the same with numpy; and where the time of a call goes, from clocks in all
  three processes.
- ``nodes``: 64 MB from one host to another on a second node, against bare actors by compiled graph and by actor calls.
- ``pipeline``: products in two stages with 16 calls in flight, against the same stages on two devices of one process.
- ``replicas``: two replicas of one host against two processes that run the same calls.

Contestants take turns, medians are of all turns; only one of them runs at a time. Each part starts a Ray of its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
import tvm
from rich.console import Console
from tvm import relax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from smoke import smoke  # noqa: E402

import relax_hetero as rh  # noqa: E402
from relax_hetero.cluster import CALL, CallPlan, Cluster, HostStep, Program, Source  # noqa: E402

console = Console()

HOSTS = {"a": {"resources": {"a": 1}, "num_cpus": 1}, "b": {"resources": {"b": 1}, "num_cpus": 1}}
STAGES = CallPlan(
    (HostStep("a", "main", (Source(CALL, 0),), 1), HostStep("b", "main", (Source(0, 0),), 1)), Source(1, 0), ("x",)
)
TURNS = 3
PARTS = ("calls", "nodes", "pipeline", "replicas")


def module(shape: tuple[int, ...], compute: Callable[[relax.Expr], relax.Expr]) -> tvm.IRModule:
    """``main(x)`` on this CPU: `compute` of a float32 tensor."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(compute(x))
        builder.emit_func_output(result)
    return builder.get()


@contextmanager
def ray_of(nodes: int) -> Iterator[Any]:
    """Ray with one node for both hosts, or one for each."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    here = os.pathsep.join([str(Path(rh.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = here  # processes of Ray find this library
    store = 2 << 30
    options = {"object_store_memory": store, "include_dashboard": False}
    started = Nodes(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "resources": {"a": 4} if nodes == 2 else {"a": 4, "b": 4}, **options},
    )
    if nodes == 2:
        started.add_node(num_cpus=8, resources={"b": 4}, object_store_memory=store)
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()
        started.shutdown()


class Bare:
    """An actor without this library."""

    def __init__(self, count: int = 0) -> None:
        self._made = np.zeros(count, "float32")

    def hand_on(self, x: np.ndarray) -> np.ndarray:
        return x

    def negate(self, x: np.ndarray) -> np.ndarray:
        return -x

    def make(self, x: np.ndarray) -> np.ndarray:
        self._made[...] = x
        return self._made

    def first(self, x: np.ndarray) -> np.ndarray:
        return x[:1].copy()


Contestant = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Opens a context with a function that makes a call."""


@contextmanager
def bare_graph(ray: Any, methods: tuple[str, str], x: np.ndarray, count: int, room: int) -> Iterator[Callable[[], Any]]:
    """Calls with `x` of two bare actors by compiled graph."""
    from ray.dag import DAGContext, InputNode

    logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # about actors that are killed
    actors = [ray.remote(Bare).options(resources={host: 1}).remote(count if host == "a" else 0) for host in ("a", "b")]
    ray.get([actor.hand_on.remote(0) for actor in actors])
    DAGContext.get_current().buffer_size_bytes = room
    with InputNode() as argument:
        node = getattr(actors[1], methods[1]).bind(getattr(actors[0], methods[0]).bind(argument))
    graph = node.experimental_compile(_max_inflight_executions=1)
    yield lambda: graph.execute(x).get().copy()
    for actor in actors:
        ray.kill(actor)  # a graph may not end while its actors live


def in_turns(contestants: dict[str, Contestant], seconds: float) -> dict[str, float]:
    """The median time of each contestant's call in milliseconds.

    Contestants take turns, and only one is open at a time, since processes of Ray's graphs poll while they wait.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(TURNS):
        for name, contestant in contestants.items():
            with contestant() as call:
                for _ in range(5):
                    call()
                end = time.perf_counter() + seconds / TURNS / len(contestants)
                while (begin := time.perf_counter()) < end or not times[name]:
                    call()
                    times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(seconds_of_call) for name, seconds_of_call in times.items()}


def calls_part(seconds: float, megabytes: int, size: int) -> None:
    """Tensors of 200 KB through two hosts, and where the time of such a call goes."""
    x = np.ones(50_000, "float32")
    part = module((50_000,), relax.op.negative)
    with ray_of(1) as ray, Cluster(Program({"a": part, "b": part}, {"main": STAGES}), HOSTS, in_flight=2) as cluster:
        medians = in_turns(
            {
                "relax_hetero": lambda: nullcontext(lambda: cluster["main"](x)),
                "bare": lambda: bare_graph(ray, ("hand_on", "hand_on"), x, 0, 1 << 20),
                "bare that computes with numpy": lambda: bare_graph(ray, ("negate", "negate"), x, 0, 1 << 20),
            },
            seconds,
        )
        report("200 KB through two hosts", medians, "ms")
        timeline(ray, cluster, x, seconds / 2)


HOST_STAGES = (
    "wake {host} up",
    "{host}: read message",
    "{host}: find task",
    "{host}: check arguments, run",
    "{host}: make message",
    "{host}: copy to shared memory",
)
STAGES_OF_A_CALL = (
    "caller: check arguments",
    "caller: copy to shared memory",
    *(stage.format(host=f"host {host}") for host in "ab" for stage in HOST_STAGES),
    "wake caller up",
    "caller: read message, copy result",
    "caller: find call",
    "caller: make result",
    "caller: end call",
)
STAMPS = 6
"""Stamps of each process in a call."""
BURST = 200
"""Calls between two readings of the hosts' clocks."""


class Stamps:
    """Times at which functions begin and end."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu = time.process_time()

    def note(self, owner: Any, name: str, before: bool = False) -> None:
        """Note when calls of ``owner.name`` end and, if `before`, begin."""
        function = getattr(owner, name)

        def noted(*args: Any) -> Any:
            if before:
                self.times.append(time.perf_counter())
            result = function(*args)
            self.times.append(time.perf_counter())
            return result

        setattr(owner, name, noted)

    def note_peers(self, peers: Any) -> None:
        """Note when this process wakes up, has read a message, and has written one."""
        self.note(peers, "_take", before=True)
        for connection in peers._connections.values():
            self.note(connection._blocks, "write")

    def take(self) -> tuple[list[float], float]:
        """Times, and seconds of the processor, since the last `take`."""
        times, before, self.cpu = self.times[:], self.cpu, time.process_time()
        self.times.clear()
        return times, self.cpu - before


def stamp_host(host: Any) -> None:
    """Note the stages of a host (runs in its process)."""
    host.stamps = Stamps()
    host.stamps.note_peers(host._loop._peers)
    host.stamps.note(host._machine, "call", before=True)
    host.stamps.note(host._loop, "_run")


def timeline(ray: Any, cluster: Cluster, x: np.ndarray, seconds: float) -> None:
    """Print the stages of a call, and the processor time of each process; functions of the cluster are replaced."""
    from relax_hetero.cluster import cluster as module_of_calls

    replica, stamps = cluster._replicas[0], Stamps()
    actors, call = list(replica._actors.handles.values()), cluster["main"]

    def on_hosts(function: Callable[[Any], Any]) -> list[Any]:
        time.sleep(0.05)  # after the end of a host's last stage
        return ray.get([actor.__ray_call__.remote(function) for actor in actors])

    on_hosts(stamp_host)
    stamps.note(module_of_calls, "bind")
    stamps.note(module_of_calls, "result_of", before=True)
    stamps.note_peers(replica._graph._peers)
    call(x)  # processes were in functions without stamps
    on_hosts(lambda host: host.stamps.take())
    stamps.take()
    durations: list[np.ndarray] = []
    busy: list[list[float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not durations:
        begins = [begin for _ in range(BURST) for begin in (time.perf_counter(), call(x))[:1]]
        times, seconds_of_processors = zip(stamps.take(), *on_hosts(lambda host: host.stamps.take()), strict=True)
        stamps.take()  # not that of the readings
        if any(len(each) != STAMPS * BURST for each in times):
            continue  # a message came in parts, or late
        own, first, second = (np.reshape(each, (BURST, -1)).T for each in times)
        edges = [begins, *own[:2], *first, *second, *own[2:], [*begins[1:], np.nan]]
        durations.append(np.diff(edges, axis=0)[:, :-1])
        busy.append([each / BURST for each in seconds_of_processors])
    by_stage = np.concatenate(durations, axis=1)
    for name, duration in zip(STAGES_OF_A_CALL, np.median(by_stage, axis=1), strict=True):
        console.print(f"{name:34} {1e6 * duration:5.0f} us")
    console.print(f"{'call':34} {1e6 * np.median(by_stage.sum(axis=0)):5.0f} us")
    for name, seconds_of_call in zip(("the caller", "host a", "host b"), np.median(busy, axis=0), strict=True):
        console.print(f"{f'processor time of {name}':34} {1e6 * seconds_of_call:5.0f} us")


def nodes_part(seconds: float, megabytes: int, size: int) -> None:
    """Many MB from one node to another."""
    count = megabytes << 18
    x = np.ones(1, "float32")
    first = module((1,), lambda x: relax.op.broadcast_to(x, (count,)))
    second = module((count,), lambda x: relax.op.strided_slice(x, [0], [0], [1]))
    program = Program({"a": first, "b": second}, {"main": STAGES})
    with ray_of(2) as ray, Cluster(program, HOSTS, in_flight=2) as cluster:
        by_calls = [ray.remote(Bare).options(resources={host: 1}).remote(count) for host in ("a", "b")]
        medians = in_turns(
            {
                "relax_hetero": lambda: nullcontext(lambda: cluster["main"](x)),
                "bare graph": lambda: bare_graph(ray, ("make", "first"), x, count, count * 4 + 10_000),
                "bare actor calls": lambda: nullcontext(
                    lambda: ray.get(by_calls[1].first.remote(by_calls[0].make.remote(x)))
                ),
            },
            seconds,
        )
        report(f"{megabytes} MB through two nodes", medians, "ms")


def stage_of(size: int) -> Callable[[relax.Expr], relax.Expr]:
    """Four products of a square matrix with itself, kept small."""

    def compute(x: relax.Expr) -> relax.Expr:
        for _ in range(4):
            x = relax.op.tanh(relax.op.matmul(x, x))
        return x

    return compute


def pipeline_part(seconds: float, megabytes: int, size: int) -> None:
    """Two stages with 16 calls in flight."""
    x = np.random.default_rng(0).random((size, size), dtype="float32") / size
    part = module((size, size), stage_of(size))
    vm = rh.vm.VirtualMachine(rh.compile(_on_two_devices(size)), max_in_flight=16)
    with ray_of(1), Cluster(Program({"a": part, "b": part}, {"main": STAGES}), HOSTS, in_flight=16) as cluster:
        np.testing.assert_array_equal(cluster["main"](x).numpy(), vm["main"](x).numpy())

        def all_of(submit: Callable[..., Any]) -> None:
            for fence in [submit("main", x) for _ in range(32)]:
                fence.result()

        medians = in_turns(
            {
                "relax_hetero": lambda: nullcontext(lambda: all_of(cluster.submit)),
                "one process": lambda: nullcontext(lambda: all_of(vm.submit)),
            },
            seconds,
        )
        report("32 calls of two stages, 16 in flight", medians, "ms")


def replicas_part(seconds: float, megabytes: int, size: int) -> None:
    """Two replicas of a host against two processes."""
    x = np.random.default_rng(0).random((size, size), dtype="float32") / size
    part = module((size, size), stage_of(size))
    plan = CallPlan((HostStep("a", "main", (Source(CALL, 0),), 1),), Source(0, 0), ("x",))
    with (
        ray_of(1),
        Cluster(Program({"a": part}, {"main": plan}), {"a": HOSTS["a"]}, replicas=2, in_flight=4) as cluster,
    ):
        begin = time.perf_counter()
        fences = []
        while time.perf_counter() - begin < seconds:
            fences.append(cluster.submit("main", x))
        for fence in fences:
            fence.result()
        ours = len(fences) / (time.perf_counter() - begin)
    os.environ.update(TVM_NUM_THREADS="1", TVM_BIND_THREADS="0")  # of processes that are started from now on
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        theirs = sum(pool.starmap(_plain_process, [(size, seconds)] * 2))
    console.print(f"two replicas: {ours:.1f} calls/s, two processes: {theirs:.1f}, ratio {ours / theirs:.2f}")


def _plain_process(size: int, seconds: float) -> float:
    """The calls per second of a process that does nothing else."""
    x = np.random.default_rng(0).random((size, size), dtype="float32") / size
    vm = rh.vm.VirtualMachine(rh.compile(module((size, size), stage_of(size))))
    vm["main"](x)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        vm["main"](x)
        count += 1
    return count / (time.perf_counter() - begin)


def _on_two_devices(size: int) -> tvm.IRModule:
    """Both stages in one module, on two devices of a core each."""
    builder = relax.BlockBuilder()
    first, second = (rh.VDevice(rh.native("llvm"), index) for index in (0, 1))
    x = relax.Var("x", relax.TensorType((size, size), "float32", first))
    with builder.function("main", [x]):
        with builder.dataflow():
            middle = builder.emit(stage_of(size)(x))
            moved = builder.emit(relax.op.to_vdevice(middle, second))
            result = builder.emit_output(stage_of(size)(moved))
        builder.emit_func_output(result)
    mod = builder.get()
    mod.update_global_info("vdevice", [first, second])
    return mod


def report(title: str, medians: dict[str, float], unit: str) -> None:
    """Print the median times of contestants."""
    ours = medians["relax_hetero"]
    best = min(time for name, time in medians.items() if name != "relax_hetero")
    text = ", ".join(f"{name} {time:.2f} {unit}" for name, time in medians.items())
    console.print(f"{title}: {text}; {ours / best:.2f} times the best other, {best / ours:.2f} of its rate")


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Parts to measure; all by default.")
@click.option("--seconds", default=10.0, show_default=True, help="Seconds of each part.")
@click.option("--megabytes", default=64, show_default=True, help="Size of the tensor between nodes.")
@click.option("--size", default=384, show_default=True, help="Rows of the square matrices of a stage.")
@smoke(seconds=0.5, megabytes=1, size=32, parts=("calls",))
def main(parts: tuple[str, ...], seconds: float, megabytes: int, size: int) -> None:
    """Compare calls over hosts with Ray alone."""
    for part in parts or PARTS:
        globals()[f"{part}_part"](seconds, megabytes, size)


if __name__ == "__main__":
    main()
