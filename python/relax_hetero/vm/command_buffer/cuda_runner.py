"""Command buffers recorded by hand on a CUDA device: launched on its current stream, and replayed as CUDA graphs.

The first submission launches its commands one by one. When the same table and numbers are submitted again, the launches
are captured as a graph, which later submissions replay. Indirect counts and predicates are read back from the device
between commands, and the submission waits for them; recordings with any of them never use graphs.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import runtime

from ...artifact.commands import GRAPH, Command, Copy, Dispatch, Fill, Reference
from ...errors import BindingError
from ..device.cuda_graphs import executable_graph
from ..device.cuda_library import CudaLibrary, cuda_library
from ..device.cuda_streams import Event, Stream
from ..machine import VirtualMachine
from ..region.walk_commands import Kernel, Memory, Values, converted_scalars, value_of, workgroups
from .binding_table import BindingTable
from .operands import parameter_name
from .recorder import Recording
from .runners import Runner, Submission

_log = logging.getLogger("relax_hetero")

MAX_GRAPHS = 16  # maximum number of CUDA graphs of a command buffer

_Numbers = tuple[int | float, ...]  # values of a submission's parameters
_Key = tuple[int, _Numbers]  # identity of a binding table, and parameters


class CudaWork:
    """Fence of a submission to a GPU. `table`: table whose memory it keeps alive."""

    def __init__(self, event: Event, table: BindingTable) -> None:
        self._event, self._table = event, table

    def wait(self) -> None:
        """Wait until the work has ended; CudaError if the GPU has failed."""
        self._event.synchronize()

    def done(self) -> bool:
        """Return whether the work has ended; CudaError if the GPU has failed."""
        return self._event.done()


class CudaCommands:
    """Submits a recording on a CUDA device, from any thread."""

    def __init__(self, device: runtime.Device, recording: Recording, library: CudaLibrary) -> None:
        self._device, self._recording, self._library = device, recording, library
        self._names = [parameter_name(index) for index in range(len(recording.parameters))]
        self._directs = [buffer.address for buffer in recording.directs]
        # How commands run, as in `RegionSpec.runs`.
        self.runs = "stream" if _reads_memory(recording.commands) else GRAPH
        self._lock = threading.Lock()
        # Graphs contain addresses, so each keeps its table alive; no graph (None) before the second submission.
        self._graphs: OrderedDict[_Key, tuple[BindingTable, int | None]] = OrderedDict()
        self._running: deque[CudaWork] = deque()
        weakref.finalize(self, _destroy_all, library, device, self._graphs)

    def submit(self, table: BindingTable, numbers: _Numbers) -> CudaWork:
        """Queue the commands on the device's current stream."""
        self._library.use(self._device.index)
        stream = Stream.current(self._library, self._device)
        with self._lock:
            graph = self._find_or_capture_graph(table, numbers)
        if graph is None:
            self._launch(table, numbers, stream)
        else:
            self._library.call("cuGraphLaunch", graph, stream.handle)
        work = CudaWork(stream.record(sleeps=True), table)
        with self._lock:
            self._running.append(work)
            while self._running[0] is not work and self._running[0].done():
                self._running.popleft()
        return work

    def _find_or_capture_graph(self, table: BindingTable, numbers: _Numbers) -> int | None:
        """The graph of a table and numbers, captured at their second submission; None at the first."""
        if self.runs != GRAPH:
            return None
        key = id(table), numbers
        entry = self._graphs.pop(key, None)
        graph = None if entry is None else entry[1] or self._capture(table, numbers)
        if self.runs == GRAPH:
            self._graphs[key] = table, graph
            while len(self._graphs) > MAX_GRAPHS:
                _, (_, oldest) = self._graphs.popitem(last=False)
                if oldest:
                    self._library.call("cuGraphExecDestroy", oldest)
        return graph

    def _capture(self, table: BindingTable, numbers: _Numbers) -> int | None:
        def launch(stream: Stream) -> None:
            with tvm_ffi.use_raw_stream(self._device, stream.handle):
                self._launch(table, numbers, stream)

        try:
            return executable_graph(self._library, self._device.index, launch)
        except Exception as error:  # a kernel may do something that cannot be captured
            _destroy_all(self._library, self._device, self._graphs)
            self.runs = "stream"
            reason = str(error).strip().splitlines()[-1]
            _log.warning("a command buffer on %s is launched command by command: %s", self._device, reason)
            return None

    def _launch(self, table: BindingTable, numbers: _Numbers, stream: Stream) -> None:
        values = {**table.values, **dict(zip(self._names, numbers, strict=True))}
        launcher = _CommandLauncher(self._library, stream, Memory(table.addresses, self._directs), values)
        for command in self._recording.commands:
            if isinstance(command, Dispatch):
                launcher.dispatch(command, self._recording.kernels[command.kernel])
            elif isinstance(command, Copy):
                launcher.copy(command)
            elif isinstance(command, Fill):
                launcher.fill(command)


def _reads_memory(commands: Sequence[Command]) -> bool:
    """Return whether a submission reads indirect counts or predicates back from the device."""
    dispatches = [command for command in commands if isinstance(command, Dispatch)]
    return any(d.count is not None or d.when is not None or d.unless is not None for d in dispatches)


def _destroy_all(library: CudaLibrary, device: runtime.Device, graphs: OrderedDict[_Key, Any]) -> None:
    try:
        device.sync()
        for _, graph in graphs.values():
            if graph:
                library.call("cuGraphExecDestroy", graph)
        graphs.clear()
    except Exception:  # at process exit the driver may have shut down already
        _log.debug("graphs on %s were not destroyed", device, exc_info=True)


class _CommandLauncher:
    """Launches commands on a stream, one by one."""

    def __init__(self, library: CudaLibrary, stream: Stream, memory: Memory, values: Values) -> None:
        self._library, self._stream, self._memory, self._values = library, stream, memory, values

    def copy(self, command: Copy) -> None:
        """Copy bytes."""
        nbytes = value_of(command.target.length, self._values)
        if nbytes:
            addresses = self._address(command.target), self._address(command.source)
            self._library.call("cuMemcpyDtoDAsync_v2", *addresses, nbytes, self._stream.handle)

    def fill(self, command: Fill) -> None:
        """Repeat a pattern."""
        address, nbytes = self._address(command.target), value_of(command.target.length, self._values)
        pattern = bytes.fromhex(command.pattern)
        words = [int.from_bytes(pattern[i : i + 4], "little") for i in range(0, len(pattern), 4)]
        if not nbytes:
            return
        if len(words) == 1:
            count = nbytes // len(pattern)
            self._library.call(f"cuMemsetD{8 * len(pattern)}Async", address, words[0], count, self._stream.handle)
            return
        for index, word in enumerate(words):  # one 2D fill for each word of the pattern
            arguments = address + 4 * index, len(pattern), word, 1, nbytes // len(pattern)
            self._library.call("cuMemsetD2D32Async", *arguments, self._stream.handle)

    def dispatch(self, command: Dispatch, kernel: Kernel) -> None:
        """Launch a kernel once for each combination of its workgroup indices, which it takes as scalars."""
        arguments: list[Any] | None = None
        for indices in workgroups(command, kernel, self._values, self._read_int32s):
            if arguments is None:
                scalars = converted_scalars(command, kernel, self._values)
                arguments = [*map(self._address, command.operands), *scalars]
            kernel.launch(*arguments, *indices)

    def _address(self, reference: Reference) -> int:
        return self._memory.address(reference, self._values)

    def _read_int32s(self, reference: Reference, count: int) -> list[int]:
        """Int32 values read from device memory, after all earlier work has ended."""
        buffer = (ctypes.c_int32 * count)()
        self._library.call(
            "cuMemcpyDtoHAsync_v2", ctypes.addressof(buffer), self._address(reference), 4 * count, self._stream.handle
        )
        self._stream.synchronize()
        return list(buffer)


class CudaRunner(Runner):
    """Runs a recording on a GPU; the work outlasts the call."""

    def __init__(self, machine: VirtualMachine, recording: Recording) -> None:
        super().__init__(machine)
        library = cuda_library()
        if library is None:
            raise BindingError("a command buffer on a CUDA device needs a working CUDA driver, found none")
        self._commands = CudaCommands(machine.devices[recording.device], recording, library)

    @property
    def runs(self) -> str:  # type: ignore[override]
        """How commands run, as in `RegionSpec.runs`."""
        return self._commands.runs

    def _submit(self, table: BindingTable, numbers: tuple[int | float, ...]) -> Submission:
        return Submission(self._commands.submit(table, numbers))
