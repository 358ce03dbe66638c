"""Command buffers that run as CUDA graphs: their memory, their capture, and the slow path of submissions.

Compiled code (`tir.commands.graph_functions`) makes submissions: it writes the addresses of bindings into a row of
pinned memory and launches the graph, whose first kernel copies the row to the device. It calls this module only for
the first submission, which captures the graph, and when all rows are in use. Without graphs every submission comes
here, and kernels are launched one by one.

A graph fixes the grids of its launches and their scalar arguments. A command buffer with symbolic extents has a graph
for each set of their values, captured at the second occurrence, so that lengths which grow with each call leave no
graphs behind, and dropped when `MAX_GRAPHS` others were used more recently.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact import graph_layout as state
from ...artifact.commands import RegionSpec
from ...artifact.dims import parse_dim
from ...artifact.graph_layout import ROWS, WAYS, Layout
from ...artifact.metadata import Metadata
from ..device.cuda_driver import CudaDriver, CudaError, cuda_driver
from ..device.tensors import alias, copy_into, empty, from_array

_log = logging.getLogger("relax_hetero")

_WAIT_SECONDS = 20e-6
"""Polling interval while all rows are in use."""

MAX_GRAPHS = 64
"""Maximum number of graphs of a command buffer with symbolic extents."""

_MAX_SEEN = 1024
"""Maximum number of parameter values that are remembered from a first submission."""

_Values = tuple[int, ...]

_get_stream: Any = tvm_ffi.LIB.TVMFFIEnvGetStream


class CudaGraph:
    """A command buffer on a CUDA device.

    Parameters
    ----------
    region : RegionSpec
        Description of the commands.
    device : runtime.Device
        CUDA device.
    constants : sequence of int
        Addresses of constants.
    submit, record : callable
        Compiled functions. `submit` takes inputs, the state and results; `record` launches all kernels, and takes the
        address of the plan and the parameters.
    driver : CudaDriver or str
        Driver, or the reason why graphs are unavailable.
    arena : runtime.Tensor, optional
        Shared memory for transient values of static size; None for an arena of its own, which grows.

    Attributes
    ----------
    state
        Pinned words that the compiled function reads and writes (`graph_layout`).
    submit_function : callable
        Function that submits it.
    """

    def __init__(
        self,
        region: RegionSpec,
        device: runtime.Device,
        constants: Sequence[int],
        submit: Callable[..., None],
        record: Callable[[Any], None],
        driver: CudaDriver | str,
        arena: runtime.Tensor | None = None,
    ) -> None:
        self._name, self._device, self._record = region.name, device, record
        self.submit_function = submit
        self._layout = layout = Layout(len(region.slots), len(region.parameters))
        self._parameters, self._arena_bytes = region.parameters, region.arena
        self._recorded: OrderedDict[_Values, int] = OrderedDict()
        self._ways: list[_Values | None] = [None] * WAYS
        self._seen: OrderedDict[_Values, None] = OrderedDict()
        self._driver = driver if isinstance(driver, CudaDriver) else None
        address = driver.pinned(8 * layout.state) if isinstance(driver, CudaDriver) else 0
        host = _words_at(address, layout.state) if address else empty((layout.state,), "int64", runtime.cpu())
        self._words: np.ndarray = np.from_dlpack(host)
        self._words[:] = 0
        self._words[state.DEVICE] = device.index
        self._words[state.GET_STREAM] = _address_of(_get_stream)
        self.state = alias(host, device)
        self._table = empty((layout.table,), "int64", device)
        copy_into(from_array(np.zeros(layout.table, "int64")), self._table)
        self._arena = empty((_arena_bytes(region),), "uint8", device) if arena is None else arena
        self._plan = np.zeros(layout.directs + len(constants) + 1, "int64")
        self._plan[state.TABLE] = self._table.data_ptr()
        self._plan[layout.directs :] = [*constants, self._arena.data_ptr()]
        if self._driver is None:
            self._warn(str(driver))
        else:
            self._free = weakref.finalize(self, _free, self._driver, device, address, self._recorded)
        _graphs[self.state.data_ptr()] = self

    def submit(self) -> None:
        """Submit with the bindings and parameters that compiled code stored in the state."""
        layout, words = self._layout, self._words
        bindings = words[layout.staged : layout.staged + layout.slots]
        values = tuple(map(int, words[layout.values : layout.values + layout.parameters]))
        graph = self._recorded.get(values)
        if graph is None or self._driver is None:
            self._reserve_arena(values)
            self._launch_kernels(bindings, values)
            if self._driver is not None and self._is_repeated(values):
                self._record_graph(values)
            return
        self._recorded.move_to_end(values)
        self._show(values, graph)
        stream = tvm_ffi.get_raw_stream(self._device)
        ticket = int(words[state.SUBMITTED])
        while ticket - int(words[state.CONSUMED]) >= ROWS:
            self._driver.check_stream(stream)
            time.sleep(_WAIT_SECONDS)
        row = layout.ring + ticket % ROWS * layout.slots
        words[row : row + layout.slots] = bindings
        self._driver.launch(graph, stream)
        words[state.SUBMITTED] = ticket + 1

    def failed(self, code: int) -> CudaError:
        """The error for a graph launch that returned `code`."""
        assert self._driver is not None, "there is no graph without a driver"
        return self._driver.error(f"launching command buffer {self._name!r} on {self._device}", code)

    def _is_repeated(self, values: _Values) -> bool:
        """Return whether parameters occurred before; True without parameters."""
        if not values or self._seen.pop(values, self) is None:
            return True
        self._seen[values] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _reserve_arena(self, values: _Values) -> None:
        """Grow the arena if necessary. Graphs contain its address, so growing drops them all."""
        if not isinstance(self._arena_bytes, str):
            return
        evaluate = parse_dim(self._arena_bytes).evaluate
        assert evaluate is not None, "the arena of a graph is written over its parameters"
        needed, present = evaluate(dict(zip(self._parameters, values, strict=True))), int(self._arena.shape[0])
        if needed <= present:
            return
        while self._recorded:
            self._drop(next(iter(self._recorded)))
        # Earlier launches may still use the old arena, which the next line frees.
        self._device.sync()
        self._arena = empty((max(needed, present * 5 // 4),), "uint8", self._device)
        self._plan[-1] = self._arena.data_ptr()

    def _launch_kernels(self, bindings: np.ndarray, values: _Values) -> None:
        self._plan[state.RING] = 0
        self._plan[state.BINDINGS : state.BINDINGS + self._layout.slots] = bindings
        self._run_plan(values)

    def _run_plan(self, values: _Values) -> None:
        self._record(ctypes.c_void_p(self._plan.ctypes.data), *values)

    def _record_graph(self, values: _Values) -> None:
        assert self._driver is not None, "recording needs a driver"
        words = self.state.data_ptr()
        self._plan[state.RING] = words + 8 * self._layout.ring
        self._plan[state.CONSUMED_AT] = words + 8 * state.CONSUMED

        def launch(stream: int) -> None:
            with tvm_ffi.use_raw_stream(self._device, stream):
                self._run_plan(values)

        try:
            graph = self._driver.record(launch)
        except Exception as error:  # a kernel may do something that cannot be captured
            while self._recorded:
                self._drop(next(iter(self._recorded)))
            self._driver = None
            self._warn(str(error).strip().splitlines()[-1])
            return
        if len(self._recorded) == MAX_GRAPHS:
            self._drop(next(iter(self._recorded)))
        self._recorded[values] = graph
        self._words[state.LAUNCH] = self._driver.graph_launch
        self._show(values, graph)

    def _show(self, values: _Values, graph: int) -> None:
        """Enter a graph into the table that compiled code searches, in place of the oldest entry."""
        if not values:
            self._words[state.GRAPH] = graph
        elif values not in self._ways:
            self._ways = [values, *self._ways[:-1]]
            self._write_ways()

    def _drop(self, values: _Values) -> None:
        assert self._driver is not None, "there is no graph without a driver"
        graph = self._recorded.pop(values)
        if not values:
            self._words[state.GRAPH] = 0
        elif values in self._ways:
            self._ways[self._ways.index(values)] = None
            self._write_ways()
        self._driver.destroy(graph)

    def _write_ways(self) -> None:
        layout = self._layout
        for way, values in enumerate(self._ways):
            entry = [0] * layout.way if values is None else [self._recorded[values], *values]
            self._words[layout.ways + way * layout.way :][: layout.way] = entry

    def _warn(self, why: str) -> None:
        _log.warning(
            "command buffer %r on %s is launched kernel by kernel, not as a graph: %s", self._name, self._device, why
        )


_graphs: weakref.WeakValueDictionary[int, CudaGraph] = weakref.WeakValueDictionary()


@tvm_ffi.register_global_func("relax_hetero.submit_graph", override=True)
def _submit(address: int) -> None:
    _graphs[address].submit()


@tvm_ffi.register_global_func("relax_hetero.graph_failed", override=True)
def _failed(address: int, code: int) -> None:
    raise _graphs[address].failed(code)


def make_graphs(
    metadata: Metadata, devices: Sequence[runtime.Device], constants: Any, module: runtime.Module
) -> tuple[Any, list[CudaGraph]]:
    """Make a machine's graphs; returns the constants with the graphs' states among them, and the graphs.

    Parameters
    ----------
    devices : sequence of runtime.Device
        Devices by manifest index.
    constants : object
        `PlacedConstants.values`.
    module : runtime.Module
        Compiled code of the executable.
    """
    regions = {region.name: region for region in metadata.regions}
    values, graphs = list(constants), []
    arenas = _shared_arenas([(regions[s.region], devices[s.device]) for s in metadata.constants if s.region])
    for index, spec in enumerate(metadata.constants):
        if spec.region:
            addresses = [constants[entry].data_ptr() for entry in spec.addresses or () if isinstance(entry, int)]
            region, device = regions[spec.region], devices[spec.device]
            submit, record = (module.get_function(name, True) for name in (region.name, f"{region.name}_record"))
            arena = None if isinstance(region.arena, str) else arenas[device]
            graph = CudaGraph(region, device, addresses, submit, record, cuda_driver(), arena)
            graphs.append(graph)
            values[index] = graph.state
    return (tvm_ffi.convert(values) if graphs else constants), graphs


def _shared_arenas(graphs: Sequence[tuple[RegionSpec, runtime.Device]]) -> dict[runtime.Device, runtime.Tensor]:
    """An arena per device: the graphs of a machine run one at a time there, and share it."""
    arena_bytes: dict[runtime.Device, int] = {}
    for region, device in graphs:
        if not isinstance(region.arena, str):
            arena_bytes[device] = max(arena_bytes.get(device, 0), _arena_bytes(region))
    return {device: empty((nbytes,), "uint8", device) for device, nbytes in arena_bytes.items()}


def _arena_bytes(region: RegionSpec) -> int:
    return 1 if isinstance(region.arena, str) else max(region.arena, 1)


def _words_at(address: int, count: int) -> runtime.Tensor:
    return from_array(np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)))


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _free(driver: CudaDriver, device: runtime.Device, address: int, recorded: Mapping[_Values, int]) -> None:
    try:
        device.sync()  # pending launches read their bindings from this memory
        for graph in recorded.values():
            driver.destroy(graph)
        driver.free_pinned(address)
    except Exception:  # at process exit the driver may have shut down already
        _log.debug("memory of a graph on %s was not freed", device, exc_info=True)
