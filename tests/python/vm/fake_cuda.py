"""A CUDA driver in Python: device memory is the host's, and streams run as late as they can."""

import ctypes
import random
import threading
from functools import cache
from types import SimpleNamespace

import numpy as np

from relax_hetero.driver.link.threads import worker_threads
from relax_hetero.target.native_target import native
from relax_hetero.vm.device.cuda_library import CudaLibrary
from relax_hetero.vm.device.pinned_staging import loop_of

NOT_READY, LOST, INVALID = 600, 719, 1
WAIT_EVENT, EVENT_RECORD = 6, 7  # kinds of a graph's nodes
NAMES = {INVALID: b"CUDA_ERROR_INVALID_VALUE", LOST: b"CUDA_ERROR_LAUNCH_FAILED"}


class FakeCuda:
    """The driver's functions, for `CudaLibrary`.

    Work waits in its stream until someone synchronises, or, with `seed`, until chance lets some of it run.
    """

    def __init__(self, seed=None):
        self.lock = threading.RLock()
        self.streams, self.events, self.pinned, self.memory = {0: []}, {}, {}, {}
        self.copies, self.failing, self.current = [], {}, threading.local()
        self.chance = None if seed is None else random.Random(seed)
        self.handles = iter(range(1000, 10**9))
        self.captures, self.graphs, self.children = {}, set(), []
        self.nodes, self.edges, self.executables = {}, {}, set()  # of graphs: kinds by node; data by pair of nodes
        self.library = SimpleNamespace(
            **{name: self._function(name) for name in dir(type(self)) if name.startswith("cu")}
        )

    def _function(self, name):
        body = getattr(self, name)

        def function(*args):
            for kind, arg in zip(function.argtypes, args, strict=True):
                kind.from_param(arg)  # as ctypes does, which refuses values that do not fit
            with self.lock:
                if self.failing.get(name):
                    return self.failing[name]
                self._run_some()
                return body(*args) or 0

        return function

    def _run_some(self):
        if self.chance is not None:
            stream = self.chance.choice(list(self.streams.values()))
            self._run(stream, self.chance.randrange(len(stream) + 1))

    def _run(self, stream, count):
        for _ in range(min(count, len(stream))):
            stream.pop(0)()

    def _push(self, stream, work):
        assert hasattr(self.current, "context"), "no context is current in this thread"
        self.streams[stream or 0].append(work)

    def cuInit(self, flags):
        pass

    def cuGetErrorName(self, status, result):
        result._obj.value = NAMES.get(status)

    def cuDevicePrimaryCtxRetain(self, result, gpu):
        result._obj.value = 100 + gpu

    def cuCtxSetCurrent(self, context):
        self.current.context = context

    def cuCtxPushCurrent_v2(self, context):
        pass

    def cuCtxPopCurrent_v2(self, result):
        pass

    def cuDeviceCanAccessPeer(self, result, gpu, peer):
        result._obj.value = 1

    def cuCtxEnablePeerAccess(self, context, flags):
        self.copies.append(("peer access", context))

    def cuStreamCreate(self, result, flags):
        result._obj.value = handle = next(self.handles)
        self.streams[handle] = []

    def cuStreamDestroy_v2(self, stream):
        self._run(self.streams[stream], len(self.streams[stream]))
        del self.streams[stream]

    def cuStreamSynchronize(self, stream):
        waiting = self.streams[stream or 0]
        self._run(waiting, len(waiting))

    def cuStreamQuery(self, stream):
        return NOT_READY if self.streams[stream or 0] else 0

    def cuStreamWaitEvent(self, stream, event, flags):
        reached = self.events[event]
        self._push(stream, lambda: self._reach(reached))

    def cuStreamBeginCapture_v2(self, stream, mode):
        self.captures[stream] = next(self.handles)

    def cuStreamEndCapture(self, stream, graph):
        graph._obj.value = handle = self.captures.pop(stream)
        self.graphs.add(handle)

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, dependencies, count):
        graph._obj.value = self.captures.get(stream)
        count._obj.value = sum(parent == graph._obj.value for parent, _ in self.children)

    def cuGraphAddChildGraphNode(self, node, graph, dependencies, count, child):
        node._obj.value = next(self.handles)
        self.children.append((graph.value, child))

    def cuStreamUpdateCaptureDependencies(self, stream, nodes, count, flags):
        assert stream in self.captures and (count, flags) == (1, 1)

    def add_node(self, graph, kind, after, data=bytes(8)):
        """Add a node of a kind after others; returns it."""
        node = next(self.handles)
        self.nodes.setdefault(graph, {})[node] = kind
        self.edges.setdefault(graph, {}).update({(other, node): data for other in after})
        return node

    def cuGraphGetNodes(self, graph, nodes, count):
        if nodes is not None:
            if not count._obj.value:
                return INVALID
            nodes[:] = list(self.nodes.get(graph, ()))[::-1]  # in any order
        count._obj.value = len(self.nodes.get(graph, ()))

    def cuGraphGetEdges_v2(self, graph, sources, targets, data, count):
        edges = self.edges.get(graph, {})
        if sources is not None and not count._obj.value:
            return INVALID
        for number, (pair, kind) in enumerate(edges.items() if sources is not None else ()):
            sources[number], targets[number] = pair
            ctypes.memmove(ctypes.addressof(data[number]), kind, 8)
        count._obj.value = len(edges)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = next(kinds[node] for kinds in self.nodes.values() if node in kinds)

    def cuGraphRemoveDependencies_v2(self, graph, sources, targets, data, count):
        assert count == 1 and self.edges[graph].pop((sources[0], targets[0])) == bytes(data._obj)

    def cuGraphAddDependencies_v2(self, graph, sources, targets, data, count):
        assert count == 1 and data is None
        self.edges[graph][sources[0], targets[0]] = bytes(8)

    def cuGraphAddEventRecordNode(self, node, graph, dependencies, count, event):
        node._obj.value = self.add_node(graph, ("event", event), dependencies[:count])

    def cuGraphDestroyNode(self, node):
        (graph,) = (graph for graph, kinds in self.nodes.items() if node in kinds)
        del self.nodes[graph][node]
        self.edges[graph] = {pair: data for pair, data in self.edges[graph].items() if node not in pair}

    def cuGraphInstantiateWithFlags(self, result, graph, flags):
        result._obj.value = handle = next(self.handles)
        self.executables.add(handle)

    def cuGraphUpload(self, graph, stream):
        assert graph in self.executables

    def cuGraphLaunch(self, graph, stream):
        assert graph in self.executables

    def cuGraphExecDestroy(self, graph):
        self.executables.remove(graph)

    def cuGraphDestroy(self, graph):
        self.graphs.remove(graph)

    def cuEventCreate(self, result, flags):
        result._obj.value = handle = next(self.handles)
        self.events[handle] = SimpleNamespace(stream=None, reached=True)

    def cuEventDestroy_v2(self, event):
        del self.events[event]

    def cuEventRecord(self, event, stream):
        self.events[event] = point = SimpleNamespace(stream=stream or 0, reached=False)
        self._push(stream, lambda: setattr(point, "reached", True))

    def cuEventSynchronize(self, event):
        self._reach(self.events[event])

    def cuEventQuery(self, event):
        return 0 if self.events[event].reached else NOT_READY

    def cuEventElapsedTime(self, result, first, second):
        result._obj.value = 1.5

    def _reach(self, point):
        while not point.reached:
            self._run(self.streams[point.stream], 1)

    def cuMemHostAlloc(self, result, nbytes, flags):
        memory = np.full(nbytes + 64, 0xAB, "uint8")
        result._obj.value = address = -(-memory.ctypes.data // 64) * 64
        self.pinned[address] = memory

    def cuMemFreeHost(self, address):
        del self.pinned[address]

    def cuMemAlloc_v2(self, result, nbytes):
        memory = np.full(nbytes + 256, 0xAB, "uint8")
        result._obj.value = address = -(-memory.ctypes.data // 256) * 256
        self.memory[address] = memory

    def cuMemFree_v2(self, address):
        del self.memory[address]

    def cuPointerGetAttribute(self, result, attribute, address):
        for start, memory in self.pinned.items():
            if start <= address < start + memory.nbytes - 64:
                result._obj.value = 1
                return 0
        return INVALID

    def cuMemcpyHtoDAsync_v2(self, target, source, nbytes, stream):
        self._copy("to the GPU", target, source, nbytes, stream)

    def cuMemcpyDtoHAsync_v2(self, target, source, nbytes, stream):
        self._copy("to the host", target, source, nbytes, stream)

    def cuMemcpyDtoDAsync_v2(self, target, source, nbytes, stream):
        self._copy("on the GPU", target, source, nbytes, stream)

    def cuMemcpy2DAsync_v2(self, pointer, stream):
        copy = pointer._obj
        assert (copy.srcMemoryType, copy.dstMemoryType) == (2, 1) and not (copy.srcXInBytes or copy.dstXInBytes)
        source, target, nbytes, rows = copy.srcDevice, copy.dstHost, copy.WidthInBytes, copy.Height
        self.copies.append(("to the host", nbytes * rows))
        for row in range(rows):
            addresses = target + row * copy.dstPitch, source + row * copy.srcPitch
            self._push(stream, lambda addresses=addresses: ctypes.memmove(*addresses, nbytes))

    def cuMemcpyPeerAsync(self, target, target_context, source, source_context, nbytes, stream):
        self._copy((source_context, target_context), target, source, nbytes, stream)

    def cuMemsetD8Async(self, address, value, count, stream):
        self._push(stream, lambda: ctypes.memset(address, value, count))

    def cuMemsetD16Async(self, address, value, count, stream):
        self._push(stream, lambda: _fill(ctypes.c_uint16, address, 2, value, count))

    def cuMemsetD32Async(self, address, value, count, stream):
        self._push(stream, lambda: _fill(ctypes.c_uint32, address, 4, value, count))

    def cuMemsetD2D32Async(self, address, pitch, value, width, height, stream):
        self._push(
            stream, lambda: [_fill(ctypes.c_uint32, address + row * pitch, 4, value, width) for row in range(height)]
        )

    def _copy(self, kind, target, source, nbytes, stream):
        self.copies.append((kind, nbytes))
        host = {"to the GPU": source, "to the host": target}.get(kind)
        is_pageable = host is not None and self.cuPointerGetAttribute(SimpleNamespace(_obj=ctypes.c_uint()), 2, host)
        if is_pageable and kind == "to the GPU" and nbytes <= 64 << 10:  # the driver reads such memory at once
            staged = ctypes.string_at(source, nbytes)
            self._push(stream, lambda: ctypes.memmove(target, staged, nbytes))
            return
        self._push(stream, lambda: ctypes.memmove(target, source, nbytes))
        if is_pageable:
            self.cuStreamSynchronize(stream)  # as the driver does, at least where it writes to such memory


def _fill(kind, address, pitch, value, count):
    for number in range(count):
        kind.from_address(address + number * pitch).value = value


class FakeLibrary(CudaLibrary):
    """The driver's library with functions that have addresses, for code that calls them itself."""

    def __init__(self, cuda):
        super().__init__(cuda.library, cuda.library)
        self._by_address = {}

    def address(self, name):
        if name not in self._by_address:
            function = self._functions[name]
            self._by_address[name] = ctypes.CFUNCTYPE(ctypes.c_int, *function.argtypes)(function)
        return ctypes.cast(self._by_address[name], ctypes.c_void_p).value


@cache
def staging_loop():
    """The loop of copies that executables for GPUs bring along."""
    return loop_of(worker_threads._compile(str(native("llvm").attrs["mtriple"])))
