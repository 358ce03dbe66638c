"""CUDA graphs with an event after each kernel, for profiles of meshes.

Kernels that wait for those of other GPUs cannot run one by one. So the graphs of all GPUs are launched as in any call,
and events measure their kernels. Between two events is a kernel with all that it waits for: other GPUs, and NCCL's
kernels before it. Kernels no longer begin while the one before ends, so that their sum is more than the graph's time.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

from ..device.cuda_graphs import KERNEL, add_edge, executable_graph, handles, nodes_and_edges
from ..device.cuda_library import CudaLibrary
from ..device.cuda_streams import Event, Stream


class TimedGraph:
    """A graph of kernels that follow each other, captured from a stream, with events.

    `launch`: function that launches the kernels on a stream. Raises CudaError if the driver cannot capture or edit the
    graph.
    """

    def __init__(self, library: CudaLibrary, gpu: int, launch: Callable[[Stream], None]) -> None:
        self._library, self._gpu = library, gpu
        self._events: list[Event] = []
        # The executable graph, which may be launched once before `microseconds`.
        self.handle = executable_graph(library, gpu, launch, self._add_events)
        weakref.finalize(self, library.status, "cuGraphExecDestroy", self.handle).atexit = False

    def microseconds(self) -> list[float]:
        """Time of each kernel, once the launched graph has ended."""
        pairs = zip(self._events, self._events[1:], strict=False)
        return [1e3 * end.milliseconds_since(begin) for begin, end in pairs]

    def _add_events(self, graph: int) -> None:
        """Add an event before all nodes, and one after each kernel and before all that follow it."""
        kinds, edges = nodes_and_edges(self._library, graph)
        self._events.append(self._add_event(graph, None, [*kinds][:1]))
        for node in (node for node, kind in kinds.items() if kind == KERNEL):
            following = [target for source, target, _ in edges if source == node]
            for source, target, data in edges:
                if source == node:
                    pair = handles([source]), handles([target])
                    self._library.call("cuGraphRemoveDependencies_v2", graph, *pair, ctypes.byref(data), 1)
            self._events.append(self._add_event(graph, node, following))

    def _add_event(self, graph: int, after: int | None, before: list[int]) -> Event:
        """Add an event to the graph, after a node or at first, and before another one, if there is any."""
        event, node = Event(self._library, self._gpu, timed=True), ctypes.c_void_p()
        dependencies = handles([] if after is None else [after])
        arguments = graph, dependencies, len(dependencies), event.handle
        self._library.call("cuGraphAddEventRecordNode", ctypes.byref(node), *arguments)
        for following in before:
            add_edge(self._library, graph, node.value or 0, following)
        return event
