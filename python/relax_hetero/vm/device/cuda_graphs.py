"""CUDA graphs: captured from streams, and edited."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter

from .cuda_library import CudaLibrary
from .cuda_streams import Stream

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
KERNEL, _WAIT_EVENT, _EVENT_RECORD = 0, 6, 7  # CU_GRAPH_NODE_TYPE_*


class EdgeData(ctypes.Structure):
    """When the target of an edge may begin (CUgraphEdgeData)."""

    _fields_ = [("ports_type_reserved", ctypes.c_uint8 * 8)]


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


def nodes_and_edges(library: CudaLibrary, graph: int) -> tuple[dict[int, int], list[tuple[int, int, EdgeData]]]:
    """The kinds of a graph's nodes, each after those that it follows, and the edges: sources, targets and data."""
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    library.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if nodes:  # the driver refuses arrays of no elements
        library.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    library.call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
    sources, targets = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = (EdgeData * count.value)()
    if data:
        library.call("cuGraphGetEdges_v2", graph, sources, targets, data, ctypes.byref(count))
    edges = [(int(a or 0), int(b or 0), each) for a, b, each in zip(sources, targets, data, strict=True)]
    before: dict[int, set[int]] = {int(node or 0): set() for node in nodes}
    for source, target, _ in edges:
        before[target].add(source)
    kinds = {}
    for node in TopologicalSorter(before).static_order():
        library.call("cuGraphNodeGetType", node, ctypes.byref(kind))
        kinds[node] = kind.value
    return kinds, edges


def remove_events(library: CudaLibrary, graph: int) -> None:
    """Remove the nodes that wait for events or record them; what follows one of them follows what is before it."""
    kinds, edges = nodes_and_edges(library, graph)
    pairs = {(source, target) for source, target, _ in edges}
    for node in (node for node, kind in kinds.items() if kind in (_WAIT_EVENT, _EVENT_RECORD)):
        before = [source for source, target in pairs if target == node]
        after = [target for source, target in pairs if source == node]
        pairs = {pair for pair in pairs if node not in pair}
        for pair in {*itertools.product(before, after)} - pairs:
            add_edge(library, graph, *pair)
            pairs.add(pair)
        library.call("cuGraphDestroyNode", node)


def add_edge(library: CudaLibrary, graph: int, source: int, target: int) -> None:
    """Let a node of a graph begin after another one."""
    library.call("cuGraphAddDependencies_v2", graph, handles([source]), handles([target]), None, 1)


def handles(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Nodes as an array, for functions of the driver."""
    return (ctypes.c_void_p * len(nodes))(*nodes)
