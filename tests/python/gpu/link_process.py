"""One of two processes with a GPU each, at an end of a link: ``python link_process.py send|receive TASK FOLDER``.

Where there is one GPU only, both use it: NCCL 2.32 allows that, with NCCL_MULTI_RANK_GPU_ENABLE=1.

They exchange the link's id by a file in FOLDER. TASK is what they do then, by its name in `TASKS`; what they found is
printed as a line of JSON. `test_gpu_links.py` starts them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]

import numpy as np  # noqa: E402
import tvm  # noqa: E402

import relax_hetero as rh  # noqa: E402
from relax_hetero.cluster.host_links import RECEIVER, SENDER, GpuLink  # noqa: E402
from relax_hetero.target.element_types import bytes_for  # noqa: E402
from relax_hetero.vm.device.tensors import bytes_of, copy_to, view_bytes  # noqa: E402

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
)  # fmt: skip
SIZES = (1, 3, 511, 4096, 65_537, 1 << 20, (16 << 20) + 5, 256 << 20)
"""Bytes."""

LIMIT = 5.0
"""Seconds that a process waits for one that has died."""

KINDS = [(dtype, (37, 5)) for dtype in DTYPES] + [("uint8", (size,)) for size in SIZES] + [("float32", (0, 3))]
"""Types and shapes of the tensors sent, in order."""


def content(number: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes of a tensor, which both processes know."""
    data = np.random.default_rng(number).integers(0, 256, bytes_for(shape, dtype), "uint8")
    return data & 1 if dtype == "bool" else data


def made(number: int, dtype: str, shape: tuple[int, ...], device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    """A tensor that goes along, on a GPU."""
    return copy_to(view_bytes(content(number, dtype, shape), shape, dtype), device)


def tensors(link: GpuLink, rank: int) -> dict[str, object]:
    """All kinds of tensors, one by one and then at once; the receiver compares them."""
    device = tvm.cuda(link.gpu)
    if rank == SENDER:
        for number, kind in enumerate(KINDS):
            link.send(made(number, *kind, device))
        link.send(*(made(number, *kind, device) for number, kind in enumerate(KINDS)))
        link.synchronize()
        return {"sent": 2 * len(KINDS)}
    singly = [link.receive(shape, dtype) for dtype, shape in KINDS]
    at_once = link.receive_all([(shape, dtype) for dtype, shape in KINDS])
    wrong = [
        f"{number} {dtype} {shape}"
        for arrived in (singly, at_once)
        for number, ((dtype, shape), tensor) in enumerate(zip(KINDS, arrived, strict=True))
        if not np.array_equal(bytes_of(tensor), content(number, dtype, shape))
    ]
    link.synchronize()
    return {"received": len(singly) + len(at_once), "wrong": wrong}


def sender_dies(link: GpuLink, rank: int) -> dict[str, object]:
    """The sender is killed after one tensor; the receiver waits for another."""
    device = tvm.cuda(link.gpu)
    if rank == SENDER:
        link.send(made(0, "float32", (1000,), device))
        link.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    right = np.array_equal(bytes_of(link.receive((1000,), "float32")), content(0, "float32", (1000,)))
    link.receive((1 << 20,), "float32")
    return {"first": right, **survived(link)}


def receiver_dies(link: GpuLink, rank: int) -> dict[str, object]:
    """The receiver is killed after one tensor; the sender has more."""
    device = tvm.cuda(link.gpu)
    if rank == RECEIVER:
        link.receive((1000,), "float32")
        link.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(3):
        link.send(made(number, "float32", (1000 if number == 0 else 4 << 20,), device))
    return survived(link)


def survived(link: GpuLink) -> dict[str, object]:
    """How the end of the other process is met, and that the GPU is of use afterwards."""
    begin, error = time.monotonic(), ""
    try:
        link.synchronize(LIMIT)
    except rh.HostError as raised:
        error = str(raised)
    seconds = time.monotonic() - begin
    tensor = made(7, "float32", (1 << 20,), tvm.cuda(link.gpu))
    usable = np.array_equal(bytes_of(tensor), content(7, "float32", (1 << 20,)))
    return {"error": error, "seconds": seconds, "usable": usable}


TASKS: dict[str, Callable[[GpuLink, int], dict[str, object]]] = {
    task.__name__: task for task in (tensors, sender_dies, receiver_dies)
}


def main(role: str, task: str, folder: str) -> None:
    """One end."""
    rank = {"send": SENDER, "receive": RECEIVER}[role]
    link = GpuLink(rank if tvm.cuda(rank).exist else 0)
    path = Path(folder) / "id"
    if rank == SENDER:
        path.with_suffix(".part").write_bytes(pickle.dumps(link.create_id()))
        path.with_suffix(".part").rename(path)
    link.connect(rank, pickle.loads(next(_appeared(path)).read_bytes()))
    result = TASKS[task](link, rank)
    link.close()
    print(json.dumps(result), flush=True)


def _appeared(path: Path) -> Iterator[Path]:
    for _ in range(6000):
        if path.exists():
            yield path
        time.sleep(0.01)
    raise TimeoutError(f"{path} did not appear")


if __name__ == "__main__":
    main(*sys.argv[1:])
