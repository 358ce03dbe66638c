"""Networks of equal parts over hosts, devices and meshes of this machine: simulated times against measured ones.

python apps/bench/cluster_bench/simulated_calls.py              # four hosts, two devices, a mesh of two

The times of a part and of transfers are measured first: a part alone on one core, and chains of small ops that cross
the same hosts with other sizes, or the same devices. From these, `simulate_calls` expects the time of one call, and of
many calls under way, where hosts share the machine's cores. Nothing else is fitted.
"""

from __future__ import annotations

import os
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
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, simulated_time  # noqa: E402
from cluster_bench.cluster_models import one_core  # noqa: E402
from cluster_bench.simulated_networks import simulate_calls  # noqa: E402
from smoke import smoke  # noqa: E402

import relax_hetero as rh  # noqa: E402
from relax_hetero.frontend.auto.measure_devices import sharing_figures_of  # noqa: E402
from relax_hetero.target.cpu_cores import num_cores  # noqa: E402
from relax_hetero.target.make_vdevice import parse_vdevices  # noqa: E402

PRODUCTS = 6
"""Products of a part."""
WIDTH = 1024


def chain(parts: int, rows: int, products: int = PRODUCTS) -> onnx.ModelProto:
    """Equal parts, whose nodes are called ``part0/...``: products of a batch of rows, or a ReLU without products."""
    generator, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    for part in range(parts):
        for number in range(max(products, 1)):
            name, result = f"part{part}/{number}", f"v{part}_{number}"
            if products:
                weight = generator.standard_normal((WIDTH, WIDTH), "float32") / WIDTH**0.5
                weights.append(numpy_helper.from_array(weight, f"w{part}_{number}"))
                nodes.append(helper.make_node("MatMul", [value, f"w{part}_{number}"], [f"m{part}_{number}"], name))
                value = f"m{part}_{number}"
            nodes.append(helper.make_node("Relu", [value], [result], f"{name}/relu"))
            value = result
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, WIDTH)) for name in ("x", value))
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Median time of a call after two untimed ones."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


class Network:
    """A compiled chain, in this process or over hosts; `close` ends it."""

    def __init__(self, parts: int, rows: int, products: int, hosts: bool, vdevices: list[Any], **options: Any) -> None:
        names = [f"{'abcdefgh'[part]}/llvm" for part in range(parts)]
        if hosts:
            options["placement"] = {f"part{part}/*": name for part, name in enumerate(names)}
            mod = rh.from_onnx(chain(parts, rows, products), vdevices=names, **options)
            self.machine: Any = rh.cluster.Cluster(mod, {name[0]: {"num_cpus": 1} for name in names}, in_flight=16)
        else:
            mod = rh.from_onnx(chain(parts, rows, products), vdevices=vdevices, **options)
            self.machine = rh.vm.VirtualMachine(rh.compile(mod), max_in_flight=16)
        self.x = np.random.default_rng(1).standard_normal((rows, WIDTH), "float32")

    def calls(self, count: int = 1) -> None:
        """Submit calls, and wait for all results in host memory."""
        for fence in [self.machine.submit("main", self.x) for _ in range(count)]:
            fence.result().numpy()

    def close(self) -> None:
        """End the processes of hosts."""
        if isinstance(self.machine, rh.cluster.Cluster):
            self.machine.close()


@click.command(help=__doc__)
@click.option("--hosts", default=4, show_default=True)
@click.option("--rows", default=64, show_default=True, help="Rows of a batch.")
@click.option("--calls", default=24, show_default=True, help="Calls under way at once.")
@click.option("--rounds", default=15, show_default=True)
@smoke(hosts=2, rows=8, calls=4, rounds=2)
def main(hosts: int, rows: int, calls: int, rounds: int) -> None:
    """Measure parts and transfers, then simulate and measure whole networks."""
    import ray

    here = str(Path(rh.__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ray.init(address="local", num_cpus=hosts, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    checks: list[Check] = []

    def compare(name: str, network: Network, expected: float, count: int = 1) -> None:
        actual = median_seconds(lambda: network.calls(count), max(rounds // count, 3)) / count
        checks.append(simulated_time(name, actual, expected / count))

    try:
        alone, sharing = (
            Network(1, rows, PRODUCTS, False, [one_core()]),
            sharing_figures_of(*parse_vdevices([one_core()])),
        )
        part, cores = median_seconds(alone.calls, rounds), num_cores()
        transfer = _transfer(hosts, rows, rounds)
        print(f"a part {part * 1e3:.3f} ms, a transfer {transfer * 1e6:.0f} us, {cores} cores, {sharing}", flush=True)
        slower = part * (1.0 if sharing is None else sharing.products)
        over_hosts = Network(hosts, rows, PRODUCTS, True, [])
        stages, transfers = [part] * hosts, [transfer] * (hosts + 1)
        compare(f"{hosts} hosts, one call", over_hosts, simulate_calls(stages, transfers, 1))
        many = simulate_calls([slower] * hosts, transfers, calls, min(calls, 16), cores)
        compare(f"{hosts} hosts, {calls} calls", over_hosts, many, calls)
        over_hosts.close()
        pair, placement = [one_core()] * 2, {"part0/*": "llvm:0", "part1/*": "llvm:1"}
        small = median_seconds(Network(1, rows, 0, False, [one_core()]).calls, rounds)
        handover = max(median_seconds(Network(2, rows, 0, False, pair, placement=placement).calls, rounds) - small, 0.0)
        print(f"from one device to the other one {handover * 1e6:.0f} us", flush=True)
        two = Network(2, rows, PRODUCTS, False, pair, placement=placement)
        compare("two devices, one call", two, simulate_calls([part] * 2, [0.0, handover, handover], 1))
        many = simulate_calls([slower] * 2, [0.0, handover, 0.0], calls, 16, cores)
        compare(f"two devices, {calls} calls", two, many, calls)
        half = median_seconds(Network(1, rows // 2, PRODUCTS, False, [one_core()]).calls, rounds)
        mesh = Network(1, rows, PRODUCTS, False, pair, data_parallel=2)
        compare("a batch over two devices", mesh, half * slower / part + 2 * handover)
    finally:
        ray.shutdown()
    if not all(check.passed for check in checks):
        raise SystemExit(1)


def _transfer(hosts: int, rows: int, rounds: int) -> float:
    """Time of a transfer of a batch between hosts: latency and rate follow from batches of other sizes."""
    sizes = (max(rows // 8, 1), rows * 4)
    seconds = []
    for size in sizes:
        work = median_seconds(Network(1, size, 0, False, [one_core()]).calls, rounds)
        network = Network(hosts, size, 0, True, [])
        seconds.append((median_seconds(network.calls, rounds) - hosts * work) / (hosts + 1))
        network.close()
    slope = max(seconds[1] - seconds[0], 0.0) / (sizes[1] - sizes[0])
    return seconds[0] + slope * (rows - sizes[0])


if __name__ == "__main__":
    main()
