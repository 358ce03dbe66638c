"""Tensors from a GPU of one process to a GPU of another, and through the host's memory; needs no Ray.

python apps/bench/cluster_bench/gpu_links.py --torch

- ``link``: a link of NCCL between two processes, one on each of two GPUs, against ``torch.distributed``'s send and
  receive in the same processes, in turns, from the first tensor sent to the last one received.
- ``pipeline``: products of matrices in two stages, one in each process, against both stages on one GPU.
- ``loop``: a link from a GPU to itself: the cost of NCCL and of the link's own work without a transfer.
- ``host``: a result that is copied from a GPU into a message (`wire.encode`), through pinned and plain memory; and an
  array that is received for a GPU's parameter, copied directly as machines do, and through pinned memory.

The first two need two GPUs, and say so where there are fewer. With NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.32
supports, both processes may use one, which shows that the command works.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import Check, verdict  # noqa: E402
from smoke import smoke  # noqa: E402

import relax_hetero as rh  # noqa: E402
from relax_hetero.cluster import wire  # noqa: E402
from relax_hetero.cluster.host_links import RECEIVER, SENDER, GpuLink  # noqa: E402
from relax_hetero.target.vdevice import with_vdevices  # noqa: E402
from relax_hetero.vm.device.cuda_streams import Stream  # noqa: E402
from relax_hetero.vm.device.memory_pools import send_buffer  # noqa: E402
from relax_hetero.vm.device.nccl import load_nccl, require_nccl  # noqa: E402
from relax_hetero.vm.device.tensors import bytes_of, copy_into, copy_to, empty, from_array, on_host  # noqa: E402

console = Console(highlight=False, width=120)

SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
"""Bytes of a tensor."""

LINK_BAR, PIPELINE_BAR = 0.9, 1.8
MIN_RATE_BYTES = 1 << 20
"""Minimum size of the tensors whose rates are compared with the bar; latency dominates for smaller ones."""

_IN_FLIGHT_BYTES, _MAX_TENSORS = 512 << 20, 200
_WAIT = 120.0  # seconds to wait for a process

Report = dict[str, Any]


def tensors_of(nbytes: int) -> int:
    """The number of tensors of a size that are sent in one turn."""
    return max(4, min(_MAX_TENSORS, _IN_FLIGHT_BYTES // nbytes))


def median_of(call: Callable[[], float], rounds: int) -> float:
    """The median of the values that calls return; the first call, which allocates, does not count."""
    return statistics.median([call() for _ in range(rounds + 1)][1:])


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def numbers(nbytes: int) -> np.ndarray:
    """The contents of a tensor."""
    return np.random.default_rng(0).integers(0, 256, nbytes, "uint8")


# One process of two.


def run_end(rank: int, barrier: Any, ids: Any, results: Any, options: Report) -> None:
    """The work of one process; its results, or its failure, go into a queue."""
    try:
        link = GpuLink(options["gpus"][rank])
        link_id = link.create_id() if rank == SENDER else ids.get(timeout=_WAIT)
        if rank == SENDER:
            ids.put(link_id)
        link.connect(rank, link_id)
        report: Report = {}
        if options["torch"]:
            _join_torch(rank, link.gpu, options["folder"])
        for nbytes in options["sizes"]:
            report[f"{nbytes}"] = link_seconds(link, rank, barrier, nbytes, options)
        report["pipeline"] = pipeline_seconds(link, rank, barrier, options)
        link.close()
        results.put((rank, report))
    except Exception:
        results.put((rank, traceback.format_exc()))
        barrier.abort()


def _join_torch(rank: int, gpu: int, folder: str) -> None:
    import torch
    import torch.distributed

    torch.cuda.set_device(gpu)
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/torch", rank=rank, world_size=2)


def link_seconds(link: GpuLink, rank: int, barrier: Any, nbytes: int, options: Report) -> dict[str, float]:
    """Seconds per tensor of each contestant; both processes take the same turns."""
    contestants = {"link": _by_link(link, rank, nbytes)}
    if options["torch"]:
        contestants["torch"] = _by_torch(rank, link.gpu, nbytes)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options["rounds"] + 1):
        for name, exchange in contestants.items():
            barrier.wait(_WAIT)
            times[name].append(timed(exchange) / tensors_of(nbytes))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def _by_link(link: GpuLink, rank: int, nbytes: int) -> Callable[[], None]:
    tensor = tvm.runtime.tensor(numbers(nbytes), tvm.cuda(link.gpu))

    checked: list[int] = []

    def exchange() -> None:
        arrived = None
        for _ in range(tensors_of(nbytes)):
            if rank == SENDER:
                link.send(tensor)
            else:
                arrived = link.receive((nbytes,), "uint8")
        link.synchronize(_WAIT)
        if arrived is not None and not checked:
            checked.append(nbytes)  # checked in the first turn, which does not count
            np.testing.assert_array_equal(bytes_of(arrived), numbers(nbytes))

    return exchange


def _by_torch(rank: int, gpu: int, nbytes: int) -> Callable[[], None]:
    import torch
    from torch import distributed

    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")

    def exchange() -> None:
        for _ in range(tensors_of(nbytes)):
            if rank == SENDER:
                distributed.send(tensor, RECEIVER)
            else:
                distributed.recv(tensor, SENDER)
        torch.cuda.synchronize()

    return exchange


def stage(gpu: int, rows: int, width: int, products: int) -> rh.vm.VirtualMachine:
    """``main(x)``: a chain of products with a matrix on a GPU, whose numbers stay of the same size."""
    weight = np.random.default_rng(1).standard_normal((width, width)) / width**0.5
    constant = relax.const(weight.astype("float32"))
    x = relax.Var("x", relax.TensorType((rows, width), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for _ in range(products):
                value = builder.emit(relax.op.matmul(value, constant))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    target = rh.native("cuda")
    exe = rh.compile(with_vdevices(builder.get(), [rh.VDevice(target)]))
    return rh.vm.VirtualMachine(exe, devices=[tvm.cuda(gpu)])


def products_for(seconds: float, rows: int, width: int) -> int:
    """The number of products that take `seconds` on the first GPU."""
    vm = stage(0, rows, width, 4)
    x = matrix(0, rows, width)

    def call() -> float:
        def work() -> None:
            vm["main"](x)
            vm.devices[0].sync()

        return timed(work)

    return max(1, round(4 * seconds / median_of(call, 9)))


def matrix(gpu: int, rows: int, width: int) -> tvm.runtime.Tensor:
    """The argument of a stage."""
    return tvm.runtime.tensor(np.random.default_rng(0).standard_normal((rows, width)).astype("float32"), tvm.cuda(gpu))


def pipeline_seconds(link: GpuLink, rank: int, barrier: Any, options: Report) -> dict[str, float]:
    """Seconds for a call: both stages on the sender's GPU, and one in each process; the last result is compared."""
    rows, width, calls, products = (options[name] for name in ("rows", "width", "calls", "products"))
    first, second = stage(link.gpu, rows, width, products), None
    x = matrix(link.gpu, rows, width)
    if rank == SENDER:
        second = stage(link.gpu, rows, width, products)

    def alone() -> None:
        assert second is not None
        for _ in range(calls):
            second["main"](first["main"](x))
        first.devices[0].sync()

    last: list[Any] = []

    def half() -> None:
        last.clear()
        for _ in range(calls):
            if rank == SENDER:
                link.send(first["main"](x))
            else:
                last[:] = [first["main"](link.receive((rows, width), "float32"))]
        first.devices[0].sync()
        link.synchronize(_WAIT)

    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(options["rounds"] + 1):
        barrier.wait(_WAIT)
        if rank == SENDER:
            seconds["one"].append(timed(alone) / calls)
        barrier.wait(_WAIT)
        seconds["two"].append(timed(half) / calls)
    if rank == RECEIVER:
        expected = first["main"](first["main"](x)).numpy()
        np.testing.assert_array_equal(last[0].numpy(), expected)
    return {name: min(times[1:]) for name, times in seconds.items() if times}


def two_processes(options: Report) -> dict[int, Report]:
    """The results of both processes by rank; RuntimeError with the text of one that failed."""
    spawn = multiprocessing.get_context("spawn")
    barrier, ids, results = spawn.Barrier(2), spawn.Queue(), spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            spawn.Process(target=run_end, args=(rank, barrier, ids, results, {**options, "folder": folder}))
            for rank in (SENDER, RECEIVER)
        ]
        for end in ends:
            end.start()
        try:
            reports = dict(results.get(timeout=2 * _WAIT) for _ in ends)
        finally:
            for end in ends:
                end.join(10)
                end.kill()
    for rank, report in reports.items():
        if isinstance(report, str):
            raise RuntimeError(f"the process of GPU {rank} failed:\n{report}")
    return reports


# One GPU.


def loop_rows(sizes: tuple[int, ...], rounds: int) -> list[tuple[int, dict[str, float]]]:
    """For each size, seconds of sending a tensor to its own GPU: by a link, and by NCCL's calls alone."""
    link, bare = GpuLink(0), require_nccl()
    link.connect(SENDER, link.create_id(), ranks=1)
    stream = Stream(link._library, 0)
    communicator = bare.communicator(1, bare.create_id(), 0)
    rows = []
    for nbytes in sizes:
        count = tensors_of(nbytes)
        tensor = tvm.runtime.tensor(numbers(nbytes), tvm.cuda(0))
        room = empty((nbytes,), "uint8", tvm.cuda(0))
        addresses = tensor.data_ptr(), room.data_ptr()

        def by_link(tensor: Any = tensor, room: Any = room, count: int = count) -> None:
            for _ in range(count):
                link.exchange([tensor], [room])
            link.synchronize(_WAIT)

        def by_nccl(addresses: Any = addresses, nbytes: int = nbytes, count: int = count) -> None:
            for _ in range(count):
                bare.start()
                communicator.send(addresses[0], nbytes, bare.byte, 0, stream.handle)
                communicator.recv(addresses[1], nbytes, bare.byte, 0, stream.handle)
                bare.end()
            stream.synchronize()

        contestants = {"link": by_link, "NCCL's calls": by_nccl}
        medians = {name: median_of(lambda call=call: timed(call), rounds) / count for name, call in contestants.items()}
        rows.append((nbytes, medians))
        np.testing.assert_array_equal(bytes_of(room), numbers(nbytes))
    link.close()
    communicator.destroy()
    return rows


def host_rows(sizes: tuple[int, ...], rounds: int) -> list[tuple[int, dict[str, float]]]:
    """For each size, seconds of copies between a GPU and arrays of the host."""
    gpu, host = tvm.cuda(0), tvm.cpu(0)
    rows = []
    for nbytes in sizes:
        result = tvm.runtime.tensor(numbers(nbytes), gpu)
        array = numbers(nbytes)
        array.flags.writeable = False  # like received arrays
        room = empty((nbytes,), "uint8", gpu)

        def detour(array: Any = array, room: Any = room, nbytes: int = nbytes) -> None:
            staged = send_buffer(nbytes, host, 0)
            if staged is None:
                return copy_into(from_array(array), room)
            np.copyto(bytes_of(staged), array)
            return copy_into(staged, room)

        copies: dict[str, Callable[[], object]] = {
            "leaves, pinned": lambda result=result: wire.encode(result),
            "leaves, plain": lambda result=result: bytes_of(on_host(result)),
            "arrives, as machines take it": lambda array=array: copy_to(from_array(array), gpu),
            "arrives, over pinned": detour,
        }
        rows.append((nbytes, {name: median_of(lambda copy=copy: timed(copy), rounds) for name, copy in copies.items()}))
    return rows


def loaded() -> None:
    """Make a machine load code, which contains the threads that copy from and to plain memory."""
    stage(0, 16, 16, 1)


def size_text(nbytes: int) -> str:
    """Bytes in powers of 1024."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def print_rates(title: str, rows: list[tuple[int, dict[str, float]]]) -> None:
    """A table of microseconds and GB/s."""
    table = Table(title=title, title_justify="left")
    table.add_column("bytes", justify="right")
    names = list(rows[0][1])
    for name in names:
        table.add_column(f"{name}, µs", justify="right")
        table.add_column("GB/s", justify="right")
    for nbytes, times in rows:
        cells = [cell for name in names for cell in (f"{times[name] * 1e6:.1f}", f"{nbytes / times[name] / 1e9:.1f}")]
        table.add_row(size_text(nbytes), *cells)
    console.print(table)


def print_pairs(reports: dict[int, Report], sizes: tuple[int, ...], with_torch: bool) -> None:
    """Print results of two processes and their bars; times are the receiver's."""
    rows = [(nbytes, reports[RECEIVER][f"{nbytes}"]) for nbytes in sizes]
    print_rates("link: from GPU to GPU, two processes", rows)
    checks = []
    if with_torch:
        ratios = {nbytes: times["torch"] / times["link"] for nbytes, times in rows}
        console.print(
            "rate over torch.distributed's: " + ", ".join(f"{size_text(n)} {r:.2f}" for n, r in ratios.items())
        )
        large = [ratio for nbytes, ratio in ratios.items() if nbytes >= MIN_RATE_BYTES]
        if large:
            checks.append(Check("link: least rate over torch.distributed's, from 1 MiB on", min(large), LINK_BAR))
    one, two = reports[SENDER]["pipeline"]["one"], reports[RECEIVER]["pipeline"]["two"]
    console.print(f"pipeline: {one * 1e3:.2f} ms a call on one GPU, {two * 1e3:.2f} ms on two")
    checks.append(Check("pipeline: calls per second over one GPU's", one / two, PIPELINE_BAR))
    for check in checks:
        console.print(f"{verdict(check)}: {check}", markup=False)


@click.command()
@click.option("--torch", "with_torch", is_flag=True, help="Also time torch.distributed.")
@click.option("--sizes", default=",".join(map(str, SIZES)), help="Bytes of tensors, separated by commas.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--calls", default=32, show_default=True, help="Calls of the pipeline, all in flight at once.")
@click.option("--milliseconds", default=5.0, show_default=True, help="Duration of a stage of the pipeline.")
@click.option("--rows", default=4096, show_default=True, help="Rows of the matrix between the stages.")
@click.option("--width", default=1024, show_default=True, help="Columns of that matrix.")
@smoke(sizes="4096", rounds=1, calls=2, milliseconds=0.1, rows=64, width=64)
def main(with_torch: bool, sizes: str, rounds: int, calls: int, milliseconds: float, rows: int, width: int) -> None:
    """Time transfers of tensors from GPU to GPU."""
    gpus = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
    counts = tuple(int(size) for size in sizes.split(","))
    if not gpus:
        console.print("not run: link, pipeline, loop, host: this machine has no NVIDIA GPU", markup=False)
        return
    loaded()
    print_rates("host: between a GPU and arrays of the host", host_rows(counts, rounds))
    nccl = load_nccl()
    if isinstance(nccl, str):
        console.print(f"not run: link, pipeline, loop: {nccl}", markup=False)
        return
    print_rates("loop: from GPU 0 to itself", loop_rows(counts, rounds))
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if gpus < 2 and not is_shared:
        console.print(f"not run: link, pipeline: they need two GPUs, found {gpus}", markup=False)
        return
    options = {
        "torch": with_torch, "sizes": counts, "rounds": rounds, "calls": calls, "rows": rows, "width": width,
        "products": products_for(milliseconds / 1e3, rows, width), "gpus": (0, 1 if gpus > 1 else 0),
    }  # fmt: skip
    if gpus < 2:
        console.print("both processes share one GPU: the bars mean nothing")
    print_pairs(two_processes(options), counts, with_torch)


if __name__ == "__main__":
    main()
