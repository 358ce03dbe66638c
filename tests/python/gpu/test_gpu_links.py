"""On a machine with NVIDIA GPUs and NCCL: links from GPU to GPU, and results that leave through pinned memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import relax_hetero as rh
from gpu.link_process import DTYPES, LIMIT, content, made
from relax_hetero.cluster import wire
from relax_hetero.cluster.host_links import SENDER, GpuLink, HostLinks
from relax_hetero.cluster.links import GpuInfo
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.vm.device.cuda_library import cuda_library
from relax_hetero.vm.device.memory_pools import PINNED_BYTES
from relax_hetero.vm.device.nccl import load_nccl
from relax_hetero.vm.device.tensors import bytes_of, copy_to, view_bytes

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
NO_NCCL = load_nccl() if GPUS else ""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
with_nccl = pytest.mark.skipif(isinstance(NO_NCCL, str), reason=f"no NCCL: {NO_NCCL}")
IS_SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
two_gpus = pytest.mark.skipif(GPUS < 2 and not IS_SHARED, reason="fewer than two NVIDIA GPUs")

GPU = tvm.cuda(0)
POISON = 0xCD


@pytest.fixture(scope="module")
def loop():
    """A link that leads back to its GPU."""
    link = GpuLink(0)
    link.connect(SENDER, link.create_id(), ranks=1)
    yield link
    link.close()


def poisoned(shape: tuple[int, ...], dtype: str) -> tvm.runtime.Tensor:
    """A tensor filled with a value that no test sends."""
    data = np.full_like(content(0, dtype, shape), POISON)
    return copy_to(view_bytes(data, shape, dtype), GPU)


def doubling(elements: int) -> rh.vm.VirtualMachine:
    """``main(x) = x + x`` on a GPU."""
    x = relax.Var("x", relax.TensorType((elements,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(result)
    return rh.vm.VirtualMachine(rh.compile(with_vdevices(builder.get(), [rh.VDevice(rh.native("cuda"))])))


@with_nccl
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_arrives(loop, dtype):
    for number, shape in enumerate(((1,), (), (37, 5), (1000, 1001))):
        target = poisoned(shape, dtype)
        loop.exchange([made(number, dtype, shape, GPU)], [target])
        loop.synchronize()
        np.testing.assert_array_equal(bytes_of(target), content(number, dtype, shape))


@with_nccl
@pytest.mark.parametrize("nbytes", [1, 2, 15, 16, 17, 4095, 65_537, (1 << 20) + 1, (64 << 20) + 3, 256 << 20])
def test_every_size_arrives_and_nothing_more(loop, nbytes):
    buffer = poisoned((nbytes + 256,), "uint8")
    target = _part(buffer, nbytes)
    loop.exchange([made(nbytes, "uint8", (nbytes,), GPU)], [target])
    loop.synchronize()
    actual = bytes_of(buffer)
    np.testing.assert_array_equal(actual[:nbytes], content(nbytes, "uint8", (nbytes,)))
    assert (actual[nbytes:] == POISON).all()


def _part(tensor: tvm.runtime.Tensor, nbytes: int) -> Any:
    """The first bytes of a tensor."""
    view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
    return view(tensor, tvm_ffi.Shape((nbytes,)), "uint8", 0)


@with_nccl
def test_many_at_once_stay_in_order(loop):
    kinds = [("float32", (100 * number,)) for number in range(20)]
    rooms = [poisoned(shape, dtype) for dtype, shape in kinds]
    loop.exchange([made(number, *kind, GPU) for number, kind in enumerate(kinds)], rooms)
    for number, (kind, target) in enumerate(zip(kinds, rooms, strict=True)):
        np.testing.assert_array_equal(bytes_of(target), content(number, *kind))


@with_nccl
def test_results_of_a_machine_are_sent_and_received_tensors_read(loop):
    """Only the link's events order the kernels before and after."""
    elements = 8 << 20
    vm = doubling(elements)
    values = np.random.default_rng(0).standard_normal(elements).astype("float32")
    x = tvm.runtime.tensor(values, GPU)
    results = []
    for _ in range(20):
        target = poisoned((elements,), "float32")
        loop.exchange([vm["main"](x)], [target])
        results.append(vm["main"](target))
        del target  # its memory is for others now
    for result in results:
        np.testing.assert_array_equal(result.numpy(), 4 * values)


@with_nccl
def test_an_error_of_nccl_ends_the_link():
    link = GpuLink(0)
    link.connect(SENDER, link.create_id(), ranks=1)
    with pytest.raises(rh.HostError, match="the link of GPU 0 failed"):
        link.exchange([], [poisoned((4,), "float32")])  # from itself, and nothing is sent
    with pytest.raises(rh.HostError, match="has failed"):
        link.send(made(0, "float32", (4,), GPU))
    link.close()


@with_nccl
def test_nobody_at_the_other_end_is_bounded():
    link = GpuLink(0, limit=2.0)
    with pytest.raises(rh.HostError, match="did not come within 2 s"):
        link.connect(SENDER, link.create_id())


def test_a_host_says_what_is_on_its_gpus():
    facts = HostLinks("a", doubling(16)).info()
    assert isinstance(facts, GpuInfo)
    assert (facts.inputs, facts.outputs) == ({"main": (0,)}, {"main": (0,)})
    assert bool(facts.problem) == isinstance(NO_NCCL, str)
    assert facts.problem or list(facts.gpus) == [0]


@pytest.mark.parametrize("nbytes", [4, PINNED_BYTES, (64 << 20) + 4])
def test_results_leave_through_pinned_memory(nbytes):
    vm = doubling(nbytes // 4)
    values = np.random.default_rng(1).standard_normal(nbytes // 4).astype("float32")
    for _ in range(3):
        actual = wire.encode(vm["main"](tvm.runtime.tensor(values, GPU)))
        assert isinstance(actual, np.ndarray)
        np.testing.assert_array_equal(actual, values + values)
        assert cuda_library().is_pinned(actual.ctypes.data) == (nbytes >= PINNED_BYTES)


def _both(task: str, folder: Path) -> list[dict[str, Any] | None]:
    """Output of two processes; None for one that was killed."""
    script = Path(__file__).with_name("link_process.py")
    ends = [
        subprocess.Popen(
            [sys.executable, script, role, task, folder], env=os.environ, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        for role in ("send", "receive")
    ]
    try:
        printed = [end.communicate(timeout=150)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    codes = [end.returncode for end in ends]
    assert all(code in (0, -9) for code in codes), f"{codes}: {printed}"
    return [json.loads(text.splitlines()[-1]) if code == 0 else None for text, code in zip(printed, codes, strict=True)]


@with_nccl
@two_gpus
def test_tensors_between_two_processes(tmp_path):
    sent, received = _both("tensors", tmp_path)
    assert received["wrong"] == []
    assert sent["sent"] == received["received"] > 40


@with_nccl
@two_gpus
@pytest.mark.parametrize("dying", ["sender", "receiver"])
def test_a_process_that_dies_is_noticed(tmp_path, dying):
    ends = _both(f"{dying}_dies", tmp_path)
    dead, survivor = ends if dying == "sender" else ends[::-1]
    assert dead is None
    assert "the link of GPU" in survivor["error"]
    assert survivor["usable"]
    assert survivor.get("first", True)
    assert survivor["seconds"] < 4 * LIMIT
