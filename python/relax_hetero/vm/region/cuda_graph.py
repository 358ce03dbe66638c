"""Command buffers that run as CUDA graphs: their memory on a device, recording, and what compiled code leaves to it.

A submission is made by compiled code (`tir.commands.graph_functions`): it writes the bindings' addresses into a row
of pinned memory and launches the graph, whose first kernel brings the row to the device. Only the first submission,
which records, and one that finds all rows in use come here. Where there are no graphs, each submission does, and
launches kernel by kernel.

A graph has the numbers of blocks of its launches, which follow from the symbolic extents, the command buffer's
parameters: each set of values that is met is recorded once, and the last `MOST_GRAPHS` are kept. Code launches the
graph of the submission before; one with other values comes here, for the graph that was recorded with them. They share
the table, the ring and the arena, so they run in one order, as submissions of one graph do; the arena has the size
that the largest of them needs.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact import graph_layout as state
from ...artifact.commands import RegionSpec
from ...artifact.graph_layout import ROWS, Layout
from ...artifact.metadata import Metadata
from ..device.cuda_driver import CudaDriver, CudaError, cuda_driver
from ..device.tensors import alias, copy_into, empty, from_array

_log = logging.getLogger("relax_hetero")

MOST_GRAPHS = 64
"""Of a command buffer, each of a few hundred bytes a launch in host memory and some kilobytes on the device."""

_WAIT_SECONDS = 20e-6
"""Between looks at whether the oldest submission has begun."""

_get_stream: Any = tvm_ffi.LIB.TVMFFIEnvGetStream


class CudaGraph:
    """A command buffer on a device.

    Parameters
    ----------
    region
    device: A CUDA device.
    constants: Addresses.
    submit, record: The compiled functions: one submits, and takes inputs, the state and results; one launches all
        kernels, and takes the address of the plan.
    driver: Why there are no graphs, where there is no driver.

    Attributes
    ----------
    state: For the function that submits.
    submit_function: That function.
    """

    def __init__(
        self,
        region: RegionSpec,
        device: runtime.Device,
        constants: Sequence[int],
        submit: Callable[..., None],
        record: Callable[[Any], None],
        driver: CudaDriver | str,
    ) -> None:
        self._name, self._device, self._record = region.name, device, record
        self.submit_function = submit
        self._layout = layout = Layout(len(region.slots), len(region.parameters))
        self._recorded: dict[tuple[int, ...], int] = {}  # graphs by the parameters' values, the last used at the end
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
        self._arena = empty((region.arena if isinstance(region.arena, int) and region.arena else 1,), "uint8", device)
        self._plan = np.zeros(layout.directs + len(constants) + 1, "int64")
        self._plan[state.TABLE] = self._table.data_ptr()
        self._plan[layout.directs :] = [*constants, self._arena.data_ptr()]
        if self._driver is None:
            self._warn(str(driver))
        else:
            self._free = weakref.finalize(self, _free, self._driver, device, address, self._recorded)
        _graphs[self.state.data_ptr()] = self

    def submit(self) -> None:
        """Submit with the bindings and parameters that the code left in the state."""
        layout, words = self._layout, self._words
        staged = words[layout.staged : layout.ring]
        bindings, values = staged[: layout.slots], tuple(map(int, staged[layout.slots : -1]))
        if values not in self._recorded or self._driver is None:
            self._fit_arena(int(staged[-1]))
            self._plan[layout.values : layout.directs] = values
            self._launch_each(bindings)
            if self._driver is not None:
                self._record_graph(values)
            return
        self._choose(values)
        stream = tvm_ffi.get_raw_stream(self._device)
        ticket = int(words[state.SUBMITTED])
        while ticket - int(words[state.CONSUMED]) >= ROWS:
            self._driver.check_stream(stream)
            time.sleep(_WAIT_SECONDS)
        row = layout.ring + ticket % ROWS * layout.slots
        words[row : row + layout.slots] = bindings
        self._driver.launch(int(words[state.GRAPH]), stream)
        words[state.SUBMITTED] = ticket + 1

    def _choose(self, values: tuple[int, ...]) -> None:
        """Have the code launch the graph of these values from now on."""
        graph = self._recorded[values] = self._recorded.pop(values)
        self._words[self._layout.recorded : self._layout.staged] = values
        self._words[state.GRAPH] = graph

    def _fit_arena(self, nbytes: int) -> None:
        """Have an arena of at least so many bytes; graphs that were recorded with a smaller one end."""
        if nbytes <= self._arena.numel():
            return
        self._words[state.GRAPH] = 0
        while self._recorded:
            self._destroy(next(iter(self._recorded)))
        self._arena = empty((1,), "uint8", self._device)  # what both took together might not fit
        self._arena = empty((nbytes,), "uint8", self._device)
        self._plan[-1] = self._arena.data_ptr()

    def _destroy(self, values: tuple[int, ...]) -> None:
        assert self._driver is not None, "there is no graph without a driver"
        self._driver.destroy(self._recorded.pop(values))  # the driver lets those in flight end

    def failed(self, code: int) -> CudaError:
        """The error for a launch of the graph that returned `code`."""
        assert self._driver is not None, "there is no graph without a driver"
        return self._driver.error(f"launching command buffer {self._name!r} on {self._device}", code)

    def _launch_each(self, bindings: np.ndarray) -> None:
        self._plan[state.RING] = 0
        self._plan[state.BINDINGS : state.BINDINGS + self._layout.slots] = bindings
        self._run_plan()

    def _run_plan(self) -> None:
        self._record(ctypes.c_void_p(self._plan.ctypes.data))

    def _record_graph(self, values: tuple[int, ...]) -> None:
        assert self._driver is not None, "recording needs a driver"
        if len(self._recorded) >= MOST_GRAPHS:
            self._destroy(next(iter(self._recorded)))
        words = self.state.data_ptr()
        self._plan[state.RING] = words + 8 * self._layout.ring
        self._plan[state.CONSUMED_AT] = words + 8 * state.CONSUMED

        def launch(stream: int) -> None:
            with tvm_ffi.use_raw_stream(self._device, stream):
                self._run_plan()

        try:
            self._recorded[values] = self._driver.record(launch)
            self._words[state.LAUNCH] = self._driver.graph_launch
            self._choose(values)
        except Exception as error:  # a kernel may do anything that cannot be recorded
            self._words[state.GRAPH] = 0
            self._driver = None
            self._warn(str(error).strip().splitlines()[-1])

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


def with_graphs(
    metadata: Metadata, devices: Sequence[runtime.Device], constants: Any, module: runtime.Module
) -> tuple[Any, list[CudaGraph]]:
    """Constants as functions take them, with the states of a machine's graphs among them, and these graphs.

    Parameters
    ----------
    devices: By manifest index.
    constants: `PlacedConstants.values`.
    module: The code.
    """
    regions = {region.name: region for region in metadata.regions}
    values, graphs = list(constants), []
    for index, spec in enumerate(metadata.constants):
        if spec.region:
            addresses = [constants[entry].data_ptr() for entry in spec.addresses or () if isinstance(entry, int)]
            region, device = regions[spec.region], devices[spec.device]
            submit, record = (module.get_function(name, True) for name in (region.name, f"{region.name}_record"))
            graph = CudaGraph(region, device, addresses, submit, record, cuda_driver())
            graphs.append(graph)
            values[index] = graph.state
    return (tvm_ffi.convert(values) if graphs else constants), graphs


def _words_at(address: int, count: int) -> runtime.Tensor:
    return from_array(np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)))


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _free(driver: CudaDriver, device: runtime.Device, address: int, recorded: dict[tuple[int, ...], int]) -> None:
    try:
        device.sync()  # launches that have not begun read their bindings from this memory
        for graph in recorded.values():
            driver.destroy(graph)
        driver.free_pinned(address)
    except Exception:  # the process ends, and the driver has ended before
        _log.debug("memory of a graph on %s was not given back", device, exc_info=True)
