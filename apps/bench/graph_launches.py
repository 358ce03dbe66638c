"""Launches of CUDA graphs that return while the GPU waits, by the nodes of the graphs; needs one GPU.

python apps/bench/graph_launches.py

A stream waits for the host, and each graph is launched there 16 times, as often as a command buffer is submitted
before its first submission ends. Graphs have kernels only, kernels with an event after each, as profiles of meshes, or
kernels with one of NCCL after each (a GPU that sends to itself), as it is captured and without NCCL's events. A launch
that does not return within 0.3 s waits for the GPU. Then the graph is launched alone: medians of the host's time of a
launch, of one by the thread of the GPU, and of the time until the graph has ended.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import click
import numpy as np
import tvm
import tvm_ffi
from smoke import smoke
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.artifact.graph_layout import RING_ROWS
from relax_hetero.vm.device.cuda_graphs import captured, executable_graph, remove_events
from relax_hetero.vm.device.cuda_library import CudaLibrary, cuda_library
from relax_hetero.vm.device.cuda_streams import Stream
from relax_hetero.vm.device.graph_launches import GraphLaunch
from relax_hetero.vm.device.nccl import load_nccl
from relax_hetero.vm.device.nccl_memory import add_child_graph
from relax_hetero.vm.region.timed_graph import TimedGraph

LIMIT_SECONDS = 0.3
"""Time after which a launch waits for the GPU."""

BYTES = 16 << 10
"""Bytes that NCCL sends."""


@I.ir_module
class Kernel:
    I.module_global_infos({"vdevice": [I.vdevice("cuda", 0)]})

    @R.function
    def main(x: R.Tensor((32,), "float32", "cuda:0")):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


class Hold:
    """Makes a stream wait for the host."""

    def __init__(self, library: CudaLibrary) -> None:
        self._address = library.pinned(4)
        self.word = np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(self._address))
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def launches(self, launch: Callable[[], None], stream: Stream) -> int:
        """Number of launches that return while the stream waits."""
        self.word[0], begin, count = 0, [time.monotonic()], 0
        if status := self._wait(stream.handle, self._address, 1, 0):
            raise click.ClickException(f"cuStreamWaitValue32 failed: {status}")

        def release() -> None:
            while not self.word[0]:
                if time.monotonic() - begin[0] > LIMIT_SECONDS:
                    self.word[0] = 1
                time.sleep(0.002)

        thread = threading.Thread(target=release)
        thread.start()
        while count < RING_ROWS:
            begin[0] = time.monotonic()
            launch()
            if self.word[0]:
                break
            count += 1
        self.word[0] = 1
        thread.join()
        stream.synchronize()
        return count


def graphs(library: CudaLibrary, count: int) -> Iterator[tuple[str, int, object]]:
    """Graphs by the nodes that they have: name, handle, and what must live as long."""
    machine = rh.vm.VirtualMachine(rh.compile(Kernel, command_buffers=False))
    x, device, nccl = tvm.runtime.tensor(np.zeros(32, "float32"), tvm.cuda(0)), tvm.cuda(0), load_nccl()
    machine["main"](x)

    def kernels(stream: Stream, child: int = 0) -> None:
        with tvm_ffi.use_raw_stream(device, stream.handle):
            for _ in range(count):
                machine["main"](x)
                if child:
                    add_child_graph(library, stream, child)

    yield "kernels", executable_graph(library, 0, kernels), x
    timed = TimedGraph(library, 0, kernels)
    yield "an event after each", timed.handle, timed
    if isinstance(nccl, str):
        print(f"without NCCL: {nccl}", flush=True)
        return
    (communicator,) = nccl.communicators([0])
    stream, buffers = Stream(library, 0), [tvm.runtime.empty((BYTES,), "uint8", device) for _ in range(2)]

    def send() -> None:
        nccl.start()
        communicator.send(buffers[0].data_ptr(), BYTES, nccl.byte, 0, stream.handle)
        communicator.recv(buffers[1].data_ptr(), BYTES, nccl.byte, 0, stream.handle)
        nccl.end()

    send()
    stream.synchronize()
    for name in ("NCCL's kernel after each, as captured", "NCCL's kernel after each, without events"):
        (child,) = captured(library, [stream], send)
        if "without" in name:
            remove_events(library, child)
        yield name, executable_graph(library, 0, lambda stream, child=child: kernels(stream, child)), communicator


def microseconds(launch: Callable[[], None], stream: Stream, rounds: int) -> tuple[float, float]:
    """Median times until a launch returns, and until the graph has ended."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        launch()
        returned = time.perf_counter() - begin
        stream.synchronize()
        times.append((returned * 1e6, (time.perf_counter() - begin) * 1e6))
    host, total = zip(*times[2:], strict=True)
    return statistics.median(host), statistics.median(total)


@click.command(help=__doc__)
@click.option("--counts", default="64,256,1024", show_default=True, help="Kernels of the graphs, a list.")
@click.option("--rounds", default=15, show_default=True)
@smoke(counts="4", rounds=1)
def main(counts: str, rounds: int) -> None:
    """Launch graphs."""
    library = cuda_library()
    if library is None or not tvm.cuda(0).exist:
        print("no NVIDIA GPU is there")
        return
    library.use(0)
    stream, hold, kept = Stream(library, 0), Hold(library), []
    for count in map(int, counts.split(",")):
        for name, graph, owner in graphs(library, count):
            kept.append(owner)

            def launch(graph: int = graph) -> None:
                library.use(0)
                library.call("cuGraphLaunch", graph, stream.handle)

            def by_thread(launch: Callable[[], None] = launch) -> None:
                GraphLaunch(0, launch).wait()

            returned = hold.launches(launch, stream)
            (host, total), (thread, _) = (microseconds(each, stream, rounds) for each in (launch, by_thread))
            times = f"{host:.0f} us a launch, {thread:.0f} us by a thread, {total:.0f} us until it has ended"
            print(f"{count} kernels, {name}: {returned} of {RING_ROWS} launches return; {times}", flush=True)
    os._exit(0)  # graphs that hold NCCL's work make an orderly end wait


if __name__ == "__main__":
    main()
