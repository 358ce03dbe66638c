"""Command buffers that run as CUDA graphs: their memory, their capture, and the slow path of submissions.

Compiled code (`tir.commands.graph_functions`) makes submissions: it writes the addresses of bindings into a row of
pinned memory and launches the graph, whose first kernel copies the row to the device. It calls this module if it finds
no graph for its parameters, or if all rows are in use. Without graphs every submission comes here, and kernels are
launched one by one.

A graph fixes the grids of its launches and their scalar arguments. A command buffer without parameters is captured
after its first submission. A command buffer with symbolic extents has a graph for each set of their values, captured at
the second occurrence: a length that grows with each call never occurs twice, and needs no graph. Of more than
`MAX_GRAPHS` graphs, the least recently used one is dropped.

A call over GPUs of a mesh launches graphs only (`vm.device.peer_memory`), and its GPUs have graphs for the same values:
each of them captures a graph at the first occurrence, and drops the oldest one.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact import graph_layout
from ...artifact.commands import Dispatch, RegionSpec
from ...artifact.dims import parse_dim
from ...artifact.graph_layout import CACHED_GRAPHS, RING_ROWS, Layout
from ...artifact.metadata import Metadata
from ..device.cuda_driver import CudaError
from ..device.cuda_graphs import executable_graph
from ..device.cuda_library import CudaLibrary, cuda_library
from ..device.cuda_memory import free_after_use
from ..device.cuda_streams import Stream, check_wait
from ..device.graph_launches import GraphLaunch
from ..device.peer_memory import peer_call
from ..device.tensors import alias, copy_into, empty, from_array
from .timed_graph import TimedGraph

_log = logging.getLogger("relax_hetero")

_POLL_SECONDS = 20e-6  # polling interval while all rows are in use
MAX_GRAPHS = 64  # maximum number of graphs of a command buffer with symbolic extents
_MAX_SEEN_ONCE = 1024  # maximum number of sets of parameter values that are remembered after one submission

_ParameterValues = tuple[int, ...]

_get_stream: Any = tvm_ffi.LIB.TVMFFIEnvGetStream


class CudaGraph:
    """A command buffer on a CUDA device."""

    def __init__(
        self,
        region: RegionSpec,  # description of the commands
        device: runtime.Device,  # CUDA device
        constants: Sequence[int],  # addresses of constants
        submit: Callable[..., None],  # compiled function of inputs, the state and results, which makes a submission
        # Compiled function that launches all kernels, to run them or to capture them. It takes the address of the plan
        # (words with addresses: ring, table, bindings, constants, arena; `graph_layout`) and the parameters.
        launch_all: Callable[..., None],
        library: CudaLibrary,  # driver
        # Memory for transient values, shared with other graphs; None for an arena of its own, which grows.
        arena: runtime.Tensor | None = None,
        # Whether it waits for the CPU: then it only runs as a graph, which is launched as a whole before the CPU works.
        has_mailboxes: bool = False,
    ) -> None:
        self._library, self._has_mailboxes = library, has_mailboxes
        self._reason = ""  # why there are no graphs
        self.region, self._times_kernels = region, False
        self._timed: TimedGraph | None = None
        self._name, self._device, self._launch_all = region.name, device, launch_all
        self.submit_function = submit
        self._layout = layout = Layout(len(region.slots), len(region.parameters))
        self._parameters, self._arena_size = region.parameters, region.arena
        self._captured: OrderedDict[_ParameterValues, int] = OrderedDict()
        self._arenas: dict[_ParameterValues, runtime.Tensor] = {}  # that the graphs use
        self._cached: list[_ParameterValues | None] = [None] * CACHED_GRAPHS
        self._seen_once: OrderedDict[_ParameterValues, None] = OrderedDict()
        count = layout.state_words
        library.use(device.index)
        host = _words_at(address := library.pinned(8 * count), count)
        self._words: np.ndarray = np.from_dlpack(host)
        self._words[:] = 0
        self._words[graph_layout.DEVICE] = device.index
        self._words[graph_layout.GET_STREAM] = _address_of(_get_stream)
        self._words[graph_layout.LAUNCH] = library.address("cuGraphLaunch")
        self.state = alias(host, device)  # pinned words that `submit_function` reads and writes (`graph_layout`)
        self._device_table = empty((layout.table_words,), "int64", device)
        copy_into(from_array(np.zeros(layout.table_words, "int64")), self._device_table)
        self._arena = empty((_static_bytes(region),), "uint8", device) if arena is None else arena
        self._plan = np.zeros(layout.constants + len(constants) + 1, "int64")
        self._plan[graph_layout.TABLE] = self._device_table.data_ptr()
        self._plan[layout.constants :] = [*constants, self._arena.data_ptr()]
        weakref.finalize(self, free_after_use, library, [device], address, self._captured)
        _graphs[self.state.data_ptr()] = self

    def submit_slowly(self) -> None:
        """Make a submission that compiled code left to the machine, with bindings and parameters from the state."""
        layout, words = self._layout, self._words
        bindings = words[layout.slow_bindings : layout.slow_bindings + layout.slots]
        values = tuple(map(int, words[layout.slow_parameters : layout.slow_parameters + layout.parameters]))
        if self._times_kernels and not self._reason:
            return self._submit_timed(bindings, values)
        needs_graph = self._has_mailboxes or peer_call.uses_peers
        if needs_graph and values not in self._captured:
            if not self._reason:
                self._reserve_arena(values)
                self._capture(values)
            if self._reason:
                raise CudaError(
                    f"command buffer {self._name!r} on {self._device} exchanges values with other devices, and needs a "
                    f"CUDA graph: {self._reason}"
                )
            if peer_call.uses_peers:
                peer_call.is_incomplete, peer_call.missing = True, f"{self._name!r} on {self._device}"
        if peer_call.is_incomplete:
            return  # the call is repeated
        graph = self._captured.get(values)
        if graph is None:
            self._reserve_arena(values)
            self._launch_without_graph(bindings, values)
            if not self._reason and self._is_repeated(values):
                self._capture(values)
            return
        if not peer_call.uses_peers:  # all GPUs of a mesh drop the same graphs, whichever come here
            self._captured.move_to_end(values)
        self._cache_graph(values, graph)
        self._launch(graph, bindings)

    def begin_timing(self) -> None:
        """Measure kernels of calls over GPUs of a mesh, by a graph with events, until `end_timing`."""
        self._times_kernels = True
        self._words[graph_layout.GRAPH] = 0  # so that compiled code leaves submissions to the machine
        self._cached = [None] * CACHED_GRAPHS
        self._write_cache()

    def end_timing(self) -> None:
        """Launch graphs without events again."""
        self._times_kernels, self._timed = False, None

    def times(self) -> list[tuple[Dispatch, float]]:
        """The commands that were launched, and the time of each in microseconds, once the GPU's work has ended."""
        if self._timed is None:
            return []
        commands = [command for command in self.region.commands if isinstance(command, Dispatch)]
        times = self._timed.microseconds()
        fetches = len(times) - len(commands)
        assert fetches in (0, 1), "a kernel that fetches the bindings may come before one kernel for each command"
        return list(zip(commands, times[fetches:], strict=True))

    def _submit_timed(self, bindings: np.ndarray, values: _ParameterValues) -> None:
        if peer_call.is_repeated:
            assert self._timed is not None, "a call that only makes graphs comes first"
            return self._launch(self._timed.handle, bindings)
        self._reserve_arena(values)
        self._timed = TimedGraph(self._library, self._device.index, lambda stream: self._record(stream, values))
        peer_call.is_incomplete, peer_call.missing = True, f"{self._name!r} on {self._device}"

    def _launch(self, graph: int, bindings: np.ndarray) -> None:
        stream = Stream.current(self._library, self._device)
        if peer_call.is_by_nccl or self._times_kernels:
            submit = partial(self._submit, graph, bindings.copy(), stream)
            peer_call.launches = [*peer_call.launches, GraphLaunch(self._device.index, submit)]
        else:
            self._submit(graph, bindings, stream)

    def _submit(self, graph: int, bindings: np.ndarray, stream: Stream) -> None:
        """Write the bindings to a row, once one is free, and launch the graph."""
        layout, words = self._layout, self._words
        ticket, begin = int(words[graph_layout.SUBMITTED]), time.monotonic()
        while ticket - int(words[graph_layout.CONSUMED]) >= RING_ROWS:
            stream.done()  # raises the error of a failed stream
            check_wait(self._device.index, time.monotonic() - begin)
            time.sleep(_POLL_SECONDS)
        row = layout.ring + ticket % RING_ROWS * layout.slots
        words[row : row + layout.slots] = bindings
        self._library.use(self._device.index)
        self._library.call("cuGraphLaunch", graph, stream.handle)
        words[graph_layout.SUBMITTED] = ticket + 1

    def launch_error(self, code: int) -> CudaError:
        """The error for a graph launch that returned `code`."""
        return self._library.error(f"launching command buffer {self._name!r} on {self._device}", code)

    def _is_repeated(self, values: _ParameterValues) -> bool:
        """Record parameter values, and return whether they occurred before; True without parameters."""
        if not values:
            return True
        if values in self._seen_once:
            del self._seen_once[values]
            return True
        self._seen_once[values] = None
        if len(self._seen_once) > _MAX_SEEN_ONCE:
            self._seen_once.popitem(last=False)
        return False

    def _reserve_arena(self, values: _ParameterValues) -> None:
        """Grow the arena if necessary. Graphs contain its address, so growing drops them all.

        Graphs of a mesh stay, with their arenas: without one of them, those of other GPUs for the same parameters,
        whose arenas grow at other ones, would wait for it.
        """
        if not isinstance(self._arena_size, str):
            return
        evaluate = parse_dim(self._arena_size).evaluate
        assert evaluate is not None, "the size of a graph's arena depends on its parameters only"
        nbytes, capacity = evaluate(dict(zip(self._parameters, values, strict=True))), int(self._arena.shape[0])
        if nbytes <= capacity:
            return
        while self._captured and not peer_call.uses_peers:
            self._drop(next(iter(self._captured)))
        # Earlier launches may still use the old arena, which the next line may free.
        self._device.sync()
        self._arena = empty((max(nbytes, capacity * 5 // 4),), "uint8", self._device)
        self._plan[-1] = self._arena.data_ptr()

    def _launch_without_graph(self, bindings: np.ndarray, values: _ParameterValues) -> None:
        self._plan[graph_layout.RING] = 0  # the bindings are in the plan
        self._plan[graph_layout.BINDINGS : graph_layout.BINDINGS + self._layout.slots] = bindings
        self._run_plan(values)

    def _run_plan(self, values: _ParameterValues) -> None:
        self._launch_all(ctypes.c_void_p(self._plan.ctypes.data), *values)

    def _capture(self, values: _ParameterValues) -> None:
        try:
            graph = executable_graph(self._library, self._device.index, lambda stream: self._record(stream, values))
        except Exception as error:  # a kernel may do something that cannot be captured
            while self._captured:
                self._drop(next(iter(self._captured)))
            self._reason = str(error).strip().splitlines()[-1]
            _log.warning(
                "command buffer %r on %s is launched kernel by kernel, not as a graph: %s",
                *(self._name, self._device, self._reason),
            )
            return
        if len(self._captured) == MAX_GRAPHS:
            self._drop(next(iter(self._captured)))
        self._captured[values], self._arenas[values] = graph, self._arena
        self._cache_graph(values, graph)

    def _record(self, stream: Stream, values: _ParameterValues) -> None:
        """Launch all kernels on a stream that captures them."""
        words = self.state.data_ptr()
        self._plan[graph_layout.RING] = words + 8 * self._layout.ring
        self._plan[graph_layout.CONSUMED_ADDRESS] = words + 8 * graph_layout.CONSUMED
        with tvm_ffi.use_raw_stream(self._device, stream.handle):
            self._run_plan(values)

    def _cache_graph(self, values: _ParameterValues, graph: int) -> None:
        """Put a graph into the cache that compiled code searches, in place of the oldest entry.

        Compiled code launches graphs itself, those of NCCL excepted (`vm.device.graph_launches`).
        """
        if peer_call.is_by_nccl:
            return
        if not values:
            self._words[graph_layout.GRAPH] = graph
        elif values not in self._cached:
            self._cached = [values, *self._cached[:-1]]
            self._write_cache()

    def _drop(self, values: _ParameterValues) -> None:
        graph, _ = self._captured.pop(values), self._arenas.pop(values)
        if not values:
            self._words[graph_layout.GRAPH] = 0
        elif values in self._cached:
            self._cached[self._cached.index(values)] = None
            self._write_cache()
        self._library.call("cuGraphExecDestroy", graph)

    def _write_cache(self) -> None:
        layout = self._layout
        for index, values in enumerate(self._cached):
            entry = [0] * layout.cache_entry_words if values is None else [self._captured[values], *values]
            begin = layout.graph_cache + index * layout.cache_entry_words
            self._words[begin : begin + layout.cache_entry_words] = entry


_graphs: weakref.WeakValueDictionary[int, CudaGraph] = weakref.WeakValueDictionary()
"""Graphs by the addresses of their states, which compiled code passes."""


@tvm_ffi.register_global_func("relax_hetero.submit_graph", override=True)
def _submit_slowly(address: int) -> None:
    _graphs[address].submit_slowly()


@tvm_ffi.register_global_func("relax_hetero.graph_failed", override=True)
def _raise_launch_error(address: int, code: int) -> None:
    raise _graphs[address].launch_error(code)


def make_graphs(
    metadata: Metadata,  # metadata of the executable
    devices: Sequence[runtime.Device],  # devices by manifest index
    constants: Any,  # array of the machine's constants by index (`PlacedConstants.values`)
    module: runtime.Module,  # compiled code of the executable
) -> tuple[Any, list[CudaGraph]]:
    """Make a machine's graphs; returns the constants, with each placeholder of a state replaced, and the graphs."""
    regions = {region.name: region for region in metadata.regions}
    values, graphs = list(constants), []
    arenas = _shared_arenas([(regions[s.region], devices[s.device]) for s in metadata.constants if s.region])
    for index, spec in enumerate(metadata.constants):
        if spec.region:
            # The other entries, symbols of kernels, do not have words in the plan.
            addresses = [constants[entry].data_ptr() for entry in spec.addresses or () if isinstance(entry, int)]
            region, device = regions[spec.region], devices[spec.device]
            submit, launch_all = (module.get_function(name, True) for name in (region.name, f"{region.name}_record"))
            arena = None if isinstance(region.arena, str) else arenas[device]
            library = cuda_library()
            assert library is not None, "a machine with a GPU has a driver"
            graph = CudaGraph(
                region, device, addresses, submit, launch_all, library, arena, metadata.has_mailboxes(region)
            )
            graphs.append(graph)
            values[index] = graph.state
    return (tvm_ffi.convert(values) if graphs else constants), graphs


@contextmanager
def timing_kernels(graphs: Sequence[CudaGraph]) -> Iterator[None]:
    """Context of calls over GPUs of a mesh whose graphs measure their kernels (`CudaGraph.times`)."""
    for graph in graphs:
        graph.begin_timing()
    try:
        yield
    finally:
        for graph in graphs:
            graph.end_timing()


def _shared_arenas(graphs: Sequence[tuple[RegionSpec, runtime.Device]]) -> dict[runtime.Device, runtime.Tensor]:
    """An arena for each device, shared by a machine's graphs there, of which one runs at a time."""
    arena_bytes: dict[runtime.Device, int] = {}
    for region, device in graphs:
        if not isinstance(region.arena, str):
            arena_bytes[device] = max(arena_bytes.get(device, 0), _static_bytes(region))
    return {device: empty((nbytes,), "uint8", device) for device, nbytes in arena_bytes.items()}


def _static_bytes(region: RegionSpec) -> int:
    """Bytes of an arena of static size; 1 for an arena that grows."""
    return 1 if isinstance(region.arena, str) else max(region.arena, 1)


def _words_at(address: int, count: int) -> runtime.Tensor:
    return from_array(np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)))


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
