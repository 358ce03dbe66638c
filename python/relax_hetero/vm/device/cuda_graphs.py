"""CUDA graphs, captured from streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from .cuda_library import CudaLibrary
from .cuda_streams import Stream

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def captured(library: CudaLibrary, streams: Sequence[Stream], launch: Callable[[], None]) -> list[int]:
    """Capture what a function launches on streams; returns a graph for each."""
    begun, graphs = [], []
    try:
        for stream in streams:
            library.use(stream.gpu)
            library.call("cuStreamBeginCapture_v2", stream.handle, _RELAXED)
            begun.append(stream)
        launch()
    finally:  # until then the streams can do nothing else
        for stream in begun:
            library.use(stream.gpu)
            graph = ctypes.c_void_p()
            status = library.status("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
            graphs.append((status, graph.value or 0))
    for status, _ in graphs:
        if status:
            raise library.error("cuStreamEndCapture", status)
    return [graph for _, graph in graphs]


def executable_graph(
    library: CudaLibrary, gpu: int, launch: Callable[[Stream], None], edit: Callable[[int], None] | None = None
) -> int:
    """Capture what a function launches on a stream of a GPU, edit the graph, and make it executable.

    The first launch does not have to send it to the GPU.
    """
    stream = Stream(library, gpu)
    (graph,) = captured(library, [stream], lambda: launch(stream))
    try:
        if edit is not None:
            edit(graph)
        executable = library.create("cuGraphInstantiateWithFlags", graph, 0)
    finally:
        library.call("cuGraphDestroy", graph)
    library.call("cuGraphUpload", executable, stream.handle)
    stream.synchronize()
    return executable
