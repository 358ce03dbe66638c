"""All-reduces over the GPUs of a host in CUDA graphs: kernels with peer access, and NCCL.

python apps/bench/collectives.py                              # two GPUs, from 16 KB, the sum of a decode step's row
python apps/bench/collectives.py --gpus 4 --kilobytes 16,512,8192

Each call runs a graph of `--chain` all-reduces of float32 on every GPU, each of which reads the last one's result: by
kernels (allreduce_strategy="custom"), and by NCCL between two copies ("nccl"; `rh.compile`). NCCL alone runs as many in
graphs of PyTorch, one process a GPU. Times are of one all-reduce, medians over rounds. The sums are compared with exact
ones before.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.artifact.peer_layout import PEER_MEMORY
from relax_hetero.target.vdevice import parse_vdevices, with_vdevices
from relax_hetero.tir.cuda.all_reduce import AllReduce, all_reduce_kernel, slots_of
from relax_hetero.transform.ir.kernels import opaque_kernel
from relax_hetero.vm.device.nccl import load_nccl

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars import Check, verdict  # noqa: E402
from gpu_bench.device_time import torch_on_gpu  # noqa: E402
from smoke import smoke  # noqa: E402

PEER_BAR = 0.7
"""Maximum time of 16 KB by kernels over NCCL's."""

NCCL_BAR = 1.2
"""Maximum time of 16 KB by NCCL, with its two copies, over NCCL's alone."""


def chain_module(gpus: int, count: int, chain: int) -> tvm.IRModule:
    """A function ``main`` of a tensor on each GPU: `chain` all-reduces of `count` numbers."""
    vdevices = parse_vdevices([{"kind": "cuda", "arch": "sm_90a"}] * gpus)
    builder = relax.BlockBuilder(with_vdevices(tvm.IRModule(), vdevices))
    shape, bindings, reduce = [1, count], [], AllReduce((1, count), gpus)
    types = [relax.TensorType(shape, "float32", vdevice) for vdevice in vdevices]
    params = [relax.Var(f"x{rank}", ty) for rank, ty in enumerate(types)]
    values, bases = list(params), []

    def emit(name: str, value: relax.Call, ty: relax.TensorType) -> relax.Var:
        relax.expr._update_type(value, ty)
        bindings.append(relax.VarBinding(relax.Var(name, ty), value))
        return bindings[-1].var

    for rank, vdevice in enumerate(vdevices):
        ty = relax.TensorType([gpus], "int64", vdevice)
        numbers = [relax.prim_value(number) for number in (rank, reduce.slot_bytes, *range(gpus))]
        bases.append(emit(f"bases{rank}", relax.op.call_pure_packed(PEER_MEMORY, *numbers, ty_args=[ty]), ty))
    for number, slot in enumerate(slots_of(chain)):
        for rank, ty in enumerate(types):
            kernel = all_reduce_kernel(reduce, rank, slot, reduce.slot_bytes, (shape, "float32"))
            gv = builder.add_func(opaque_kernel(kernel), f"all_reduce_{rank}")
            operands = relax.Tuple([values[rank], bases[rank], values[rank]])
            values[rank] = emit(f"y{rank}_{number}", relax.op.call_tir(gv, operands, ty), ty)
    result = relax.Tuple(values)
    body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
    builder.add_func(relax.Function(params, body, result.ty).with_attr("global_symbol", "main"), "main")
    return with_vdevices(builder.get(), vdevices)


def microseconds(run: Callable[[], object], finish: Callable[[], object], calls: int, chain: int, rounds: int) -> float:
    """Median time of one all-reduce."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        finish()
        times.append((time.perf_counter() - begin) * 1e6 / calls / chain)
    return statistics.median(times[2:])


def ours(executable: rh.vm.Executable, gpus: int, count: int, chain: int, rounds: int) -> float:
    """Time of one of our all-reduces, after a check of the sums."""
    machine = rh.vm.VirtualMachine(executable)
    arrays = [np.arange(count, dtype="float32")[None] % 7 + rank for rank in range(gpus)]
    tensors = [tvm.runtime.tensor(array, tvm.cuda(rank)) for rank, array in enumerate(arrays)]
    expected = sum(arrays) * np.float32(gpus) ** (chain - 1)
    for _ in range(2):
        for result in machine["main"](*tensors):
            np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6)

    def finish() -> None:
        for tensor in tensors:
            tensor.device.sync()

    run = machine.prepare("main", tensors)
    return microseconds(run, finish, _calls(count), chain, rounds)


def _calls(count: int) -> int:
    return 10 if count <= 4 << 20 else 2


def _nccl(rank: int, gpus: int, counts: Sequence[int], chain: int, rounds: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder}/rendezvous", rank=rank, world_size=gpus, device_id=torch.device("cuda", rank)
    )
    times = []
    for count in counts:
        x = torch.zeros(count, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(chain):
                dist.all_reduce(x)
        graph.replay()
        dist.barrier()
        times.append(microseconds(graph.replay, torch.cuda.synchronize, _calls(count), chain, rounds))
        dist.barrier()
    if rank == 0:
        Path(folder, "times").write_text(" ".join(map(str, times)))
    os._exit(0)  # graphs that hold NCCL's work make an orderly end wait


def nccl(gpus: int, counts: Sequence[int], chain: int, rounds: int) -> list[float | None]:
    """Times of one of NCCL's, for each number of elements; None without PyTorch."""
    if torch_on_gpu() is None:
        return [None] * len(counts)
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_nccl, (gpus, counts, chain, rounds, folder), nprocs=gpus)
        return [float(text) for text in Path(folder, "times").read_text().split()]


@click.command(help=__doc__)
@click.option("--gpus", default=2, show_default=True)
@click.option(
    "--kilobytes", default="16,512,8192,65536", show_default=True, help="Bytes of the tensors / 1024, a list."
)
@click.option("--chain", default=64, show_default=True, help="All-reduces of a graph.")
@click.option("--rounds", default=11, show_default=True)
@smoke(kilobytes="16", chain=3, rounds=1)
def main(gpus: int, kilobytes: str, chain: int, rounds: int) -> None:
    """Time all-reduces."""
    sizes, checks = list(map(int, kilobytes.split(","))), []
    modules = [chain_module(gpus, size * 256, chain) for size in sizes]
    executables = {
        strategy: [rh.compile(module, allreduce_strategy=strategy) for module in modules]
        for strategy in ("custom", "nccl")
    }
    if not tvm.cuda(gpus - 1).exist:
        print(f"compiled for {', '.join(map(str, sizes))} KB; {gpus} GPUs are not there")
        return
    has_nccl = not isinstance(load_nccl(), str)
    peers = nccl(gpus, [size * 256 for size in sizes], chain, rounds)
    for number, (size, peer) in enumerate(zip(sizes, peers, strict=True)):
        own = ours(executables["custom"][number], gpus, size * 256, chain, rounds)
        between = ours(executables["nccl"][number], gpus, size * 256, chain, rounds) if has_nccl else None
        share = "" if peer is None else f", NCCL in graphs of PyTorch {peer:.2f} us, {own / peer:.2f} of it"
        by_nccl = "" if between is None else f", by NCCL {between:.2f} us"
        print(f"{size} KB over {gpus} GPUs: kernels {own:.2f} us{by_nccl}{share}", flush=True)
        if peer is not None and size == 16:
            checks.append(Check("16 KB: time over NCCL's", own / peer, PEER_BAR, at_most=True))
            if between is not None:
                checks.append(Check("16 KB by NCCL: time over NCCL's", between / peer, NCCL_BAR, at_most=True))
    for check in checks:
        print(f"{verdict(check)}: {check}")


if __name__ == "__main__":
    main()
