"""CUDA graphs with an event after each kernel, for profiles of meshes.

Kernels that wait for those of other GPUs cannot run one by one. So the graphs of all GPUs are launched as in any call,
and events measure their kernels. Between two events is a kernel with all that it waits for: other GPUs, and NCCL's
kernels before it. Kernels no longer begin while the one before ends, so that their sum is more than the graph's time.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from graphlib import TopologicalSorter

from ..device.cuda_graphs import executable_graph
from ..device.cuda_library import CudaLibrary
from ..device.cuda_streams import Event, Stream

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _EdgeData(ctypes.Structure):
    _fields_ = [("ports_type_reserved", ctypes.c_uint8 * 8)]


class TimedGraph:
    """A graph of kernels that follow each other, captured from a stream, with events.

    Parameters
    ----------
    launch : callable
        Function that launches the kernels on a stream.

    Attributes
    ----------
    handle : int
        The executable graph, which may be launched once before `microseconds`.

    Raises
    ------
    CudaError
        If the driver cannot capture or edit the graph.
    """

    def __init__(self, library: CudaLibrary, gpu: int, launch: Callable[[Stream], None]) -> None:
        self._library, self._gpu = library, gpu
        self._events: list[Event] = []
        self.handle = executable_graph(library, gpu, launch, self._add_events)
        weakref.finalize(self, library.status, "cuGraphExecDestroy", self.handle).atexit = False

    def microseconds(self) -> list[float]:
        """Time of each kernel, once the launched graph has ended."""
        pairs = zip(self._events, self._events[1:], strict=False)
        return [1e3 * end.milliseconds_since(begin) for begin, end in pairs]

    def _add_events(self, graph: int) -> None:
        """Add an event before all nodes, and one after each kernel and before all that follow it."""
        nodes, edges = self._nodes(graph)
        self._events.append(self._add_event(graph, None, nodes[:1]))
        for node in nodes:
            kind = ctypes.c_int()
            self._library.call("cuGraphNodeGetType", node, ctypes.byref(kind))
            if kind.value != _KERNEL:
                continue
            following = [target for source, target, _ in edges if source == node]
            for source, target, data in edges:
                if source == node:
                    pair = _handles([source]), _handles([target])
                    self._library.call("cuGraphRemoveDependencies_v2", graph, *pair, ctypes.byref(data), 1)
            self._events.append(self._add_event(graph, node, following))

    def _nodes(self, graph: int) -> tuple[list[int], list[tuple[int, int, _EdgeData]]]:
        """The nodes in order, and the edges: sources, targets and data."""
        count = ctypes.c_size_t()
        self._library.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        handles = (ctypes.c_void_p * count.value)()
        self._library.call("cuGraphGetNodes", graph, handles, ctypes.byref(count))
        self._library.call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
        sources, targets = ((ctypes.c_void_p * count.value)() for _ in range(2))
        data = (_EdgeData * count.value)()
        self._library.call("cuGraphGetEdges_v2", graph, sources, targets, data, ctypes.byref(count))
        edges = [(int(a or 0), int(b or 0), each) for a, b, each in zip(sources, targets, data, strict=True)]
        before: dict[int, set[int]] = {int(node or 0): set() for node in handles}
        for source, target, _ in edges:
            before[target].add(source)
        return list(TopologicalSorter(before).static_order()), edges

    def _add_event(self, graph: int, after: int | None, before: list[int]) -> Event:
        """Add an event to the graph, after a node or at first, and before another one, if there is any."""
        event, node = Event(self._library, self._gpu, timed=True), ctypes.c_void_p()
        dependencies = _handles([] if after is None else [after])
        arguments = graph, dependencies, len(dependencies), event.handle
        self._library.call("cuGraphAddEventRecordNode", ctypes.byref(node), *arguments)
        for following in before:
            pair = _handles([node.value or 0]), _handles([following])
            self._library.call("cuGraphAddDependencies_v2", graph, *pair, None, 1)
        return event


def _handles(nodes: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)
