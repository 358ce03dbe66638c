"""Profiles: the time of each kernel and transfer of one call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tvm import runtime

from ..artifact.commands import Dispatch, RegionSpec
from ..artifact.metadata import BODY_PREFIX, CPU, Metadata, device_names
from ..display.html import Column, bar, device_html, folded, table, view
from ..display.text import text_table
from .device.cuda_library import CUDA, CudaLibrary, cuda_library
from .device.cuda_streams import Event, Stream
from .device.peer_memory import peer_call
from .region.cuda_graph import CudaGraph
from .region.profile_regions import RegionCalls
from .region.walk_commands import raise_kernel_error

_TRANSFERS = ("relax_hetero.to_device", "relax_hetero.stream_to_device")
_BUILTIN = ("vm.builtin.", "relax_hetero.pinned_storage", "runtime.TVMTensorCreateView")
VM_OVERHEAD = "(allocation, shapes, bytecode)"
"""Symbol of the row of the virtual machine's own work: everything besides kernels and transfers."""
TO_DEVICE = "to_device"  # symbol of the rows of transfers to a device
_MAX_ROWS = 40  # rows that a notebook shows at once; the others are folded
_RUN, _SKIP_RUN = 0, 1  # return values of an instrument (TVM's `VMInstrumentReturnKind`)


@dataclass(frozen=True)
class ProfileRow:
    """A kernel on one device, transfers to one device, a whole command buffer, or the virtual machine's own work.

    Attributes
    ----------
    symbol : str
        The kernel's name, or the command buffer's; ``to_device`` for transfers; for the virtual machine's own work
        ``(allocation, shapes, bytecode)``.
    device : str
        ``kind:i``, the destination for transfers; ``host`` for the implicit one and the machine.
    ops : tuple of str
        The model's ops that the kernel computes.
    calls : int
        Number of runs.
    microseconds : float
        Total time of all calls.
    share : float
        Fraction of the whole call, 0 to 1. Devices may work at the same time.
    operations, bytes : int
        Operations and bytes of each call, as in `DispatchSpec`; 0 if unknown.
    precision : str
        Element types of its products, else of its arguments, as in `DispatchSpec`.
    """

    symbol: str
    device: str
    ops: tuple[str, ...]
    calls: int
    microseconds: float
    share: float
    operations: int = 0
    bytes: int = 0
    precision: str = ""


@dataclass(frozen=True)
class CommandTime:
    """A kernel call of a command buffer."""

    # The command buffer, the kernel, and the result's name in the model.
    region: str
    kernel: str
    variable: str
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """The measurements of `VirtualMachine.profile`, longest row first; printing it gives a table.

    Attributes
    ----------
    function : str
        Name of the function.
    rows : tuple of ProfileRow
        Kernels, transfers and the machine's own work, longest first.
    microseconds : float
        Time of the whole call, including the cost of measuring.
    commands : tuple of CommandTime
        Times of commands in order, for command buffers whose kernels were measured one by one.
    """

    function: str
    rows: tuple[ProfileRow, ...]
    microseconds: float
    commands: tuple[CommandTime, ...] = ()

    def to_json(self) -> str:
        """JSON text of the profile."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        head = ("kernel", "device", "precision", "ops", "calls", "us", "share")
        body = [
            (
                *(row.symbol, row.device, row.precision, _shorten(row.ops)),
                *(str(row.calls), f"{row.microseconds:.1f}", f"{row.share:.1%}"),
            )
            for row in self.rows
        ]
        return text_table(head, [*body, ("total", "", "", "", "", f"{self.microseconds:.1f}", "100.0%")], left=4)

    def _repr_html_(self) -> str:
        columns = [
            *(Column("kernel"), Column("device"), Column("precision"), Column("ops"), Column("calls", True)),
            *(Column("µs", True), Column("share"), Column("GFLOP/s", True)),
        ]
        names = sorted({row.device for row in self.rows} - {"host"})
        rows = [
            (
                *(row.symbol, device_html(row.device, names), row.precision, ", ".join(row.ops), row.calls),
                *(f"{row.microseconds:,.1f}", bar(row.share), _rate(row.operations * row.calls, row.microseconds)),
            )
            for row in self.rows
        ]
        caption = f"Profile of {self.function!r}: {self.microseconds:,.1f} µs"
        tables = [table(caption, columns, rows[:_MAX_ROWS])]
        if len(rows) > _MAX_ROWS:
            tables.append(folded(f"{len(rows) - _MAX_ROWS} more rows", table("", columns, rows[_MAX_ROWS:])))
        return view(*tables)


def _rate(operations: int, microseconds: float) -> str:
    return f"{operations / microseconds / 1e3:,.1f}" if operations and microseconds else ""


def _shorten(ops: Sequence[str], limit: int = 48) -> str:
    text = ", ".join(ops)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True)
class _Waiting:
    """Names of command buffers that wait for each other: those of GPUs cannot end before those of the CPU have."""

    on_gpu: frozenset[str]
    on_cpu: frozenset[str]

    @classmethod
    def of(cls, metadata: Metadata) -> _Waiting:
        """The command buffers of an executable."""
        waiting = {region.name: region.device for region in metadata.regions if metadata.has_mailboxes(region)}
        on_cpu = frozenset(name for name, index in waiting.items() if metadata.devices[index].device_type == CPU)
        return cls(frozenset(waiting) - on_cpu, on_cpu)


class ProfileRecorder:
    """Measures the calls that a machine's bytecode makes; a call's own time excludes nested calls."""

    def __init__(
        self,
        metadata: Metadata,  # metadata of the machine's executable
        devices: Sequence[runtime.Device],  # devices of the machine
        regions: RegionCalls | None = None,  # command buffers whose kernels are measured instead of the whole
    ) -> None:
        self._metadata, self._regions = metadata, regions
        self._buffers = {region.name: region for region in metadata.regions}
        self._device_keys = [(device.dlpack_device_type(), device.index) for device in devices]
        distinct = {(d.dlpack_device_type(), d.index): d for d in devices if d.dlpack_device_type() != CPU}
        self._devices = list(distinct.values())
        self._waiting = _Waiting.of(metadata)
        self._begun: tuple[str, float] | None = None
        self._stack: list[tuple[float, list[float]]] = []
        self._own: dict[tuple[str, int], list[float]] = {}
        self._begin = self._end = self._overhead = 0.0
        self._commands: list[CommandTime] = []

    def instrument(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        """Called by TVM before and after each bytecode call."""
        if symbol in self._waiting.on_gpu or symbol in self._waiting.on_cpu:
            return self._instrument_waiting(symbol, before, args)
        if self._begun is None:  # else a GPU waits for what follows
            self._synchronise(symbol)
        now = time.perf_counter()
        if before:
            self._begin = self._begin or now
            calls = self._regions.kernel_calls(symbol, args) if self._regions is not None else None
            if calls is not None:
                self._measure(symbol, calls, now)
                return _SKIP_RUN
            self._stack.append((time.perf_counter(), []))
            return _RUN
        start, inner = self._stack.pop()
        elapsed = now - start
        if self._stack:
            self._stack[-1][1].append(elapsed)
        self._own.setdefault((symbol, self._device(symbol, args)), []).append(elapsed - sum(inner))
        self._end = now
        return _RUN

    def _instrument_waiting(self, symbol: str, before: bool, args: Sequence[Any]) -> int:
        """`instrument` for command buffers that wait for each other: the GPU's time ends after the CPU's."""
        if symbol in self._waiting.on_gpu:
            if before:
                self._synchronise(symbol)
                self._begun = symbol, time.perf_counter()
                self._begin = self._begin or self._begun[1]
            return _RUN
        assert self._begun is not None, "the GPU's command buffer is submitted first"
        calls = self._regions.kernel_calls(symbol, args) if before and self._regions is not None else None
        if calls is not None:
            self._measure(symbol, calls, time.perf_counter())
        elif before:
            return _RUN
        (buffer, begin), self._begun = self._begun, None
        self._synchronise(symbol)
        self._end = time.perf_counter()
        self._own.setdefault((buffer, self._buffers[buffer].device), []).append(self._end - begin)
        return _SKIP_RUN if before else _RUN

    def _add_command(self, region: str, command: Dispatch, seconds: float) -> None:
        self._own.setdefault((command.kernel, self._buffers[region].device), []).append(seconds)
        self._commands.append(CommandTime(region, command.kernel, command.variable, seconds * 1e6))

    def _measure(self, region: str, calls: Iterable[tuple[Dispatch, Callable[[], int]]], begin: float) -> None:
        """Run the kernels of a command buffer one by one; the overhead of doing so is left out of all times."""
        inside = 0.0
        for command, call in calls:
            start = time.perf_counter()
            status = call()
            elapsed = time.perf_counter() - start
            if status:
                raise_kernel_error()
            self._add_command(region, command, elapsed)
            inside += elapsed
        self._end = time.perf_counter()
        self._overhead += self._end - begin - inside
        if self._stack:
            self._stack[-1][1].append(self._end - begin)

    def _synchronise(self, symbol: str) -> None:
        if not symbol.startswith(_BUILTIN):
            for device in self._devices:
                device.sync()

    def _device(self, symbol: str, args: Sequence[Any]) -> int:
        """The manifest index of a call's device (a transfer's destination); -1 for the host."""
        if symbol in _TRANSFERS:
            return int(args[1])
        dispatch = self._metadata.dispatches.get(symbol)
        if dispatch is None or not dispatch.other_devices:
            return -1 if dispatch is None else dispatch.device
        devices = (arg.device for arg in args if isinstance(arg, runtime.Tensor))
        used = {(device.dlpack_device_type(), device.index) for device in devices}
        matches = (index for index in dispatch.devices if index >= 0 and self._device_keys[index] in used)
        return next(matches, dispatch.device)

    def profile(self, function: str) -> Profile:
        """The rows, longest first."""
        metadata = self._metadata
        total = (self._end - self._begin - self._overhead) * 1e6
        names = [*device_names(metadata.devices), "host"]
        rows: list[ProfileRow] = []
        for (symbol, index), times in self._own.items():
            microseconds = sum(times) * 1e6
            share = microseconds / total if total else 0.0
            if symbol in _TRANSFERS:
                rows.append(ProfileRow(TO_DEVICE, names[index], (), len(times), microseconds, share))
            elif symbol in metadata.dispatches:
                dispatch = metadata.dispatches[symbol]
                work = dispatch.operations, dispatch.bytes, dispatch.precision
                rows.append(ProfileRow(symbol, names[index], dispatch.ops, len(times), microseconds, share, *work))
            elif symbol in self._buffers:
                row = _buffer_row(self._buffers[symbol], metadata)
                rows.append(replace(row, calls=len(times), microseconds=microseconds, share=share))
            elif not symbol.startswith(_BUILTIN) and symbol.removeprefix(BODY_PREFIX) not in metadata.signatures:
                rows.append(ProfileRow(symbol, "host", (), len(times), microseconds, share))
        rest = max(0.0, total - self._measured(rows))
        rows.append(ProfileRow(VM_OVERHEAD, "host", (), 1, rest, rest / total if total else 0.0))
        rows.sort(key=lambda row: -row.microseconds)
        return Profile(function, tuple(rows), total, tuple(self._commands))

    def _measured(self, rows: Sequence[ProfileRow]) -> float:
        """The part of the call, in microseconds, that the rows measure."""
        return sum(row.microseconds for row in rows)


class MeshRecorder(ProfileRecorder):
    """Measures a call over GPUs of a mesh, whose kernels wait for each other, by events: nothing waits for a GPU."""

    def __init__(
        self,
        metadata: Metadata,  # metadata of the machine's executable
        devices: Sequence[runtime.Device],  # devices of the machine
        graphs: Sequence[CudaGraph],  # graphs of the machine, which time their kernels
        library: CudaLibrary,  # CUDA's driver
    ) -> None:
        super().__init__(metadata, devices)
        self._graphs, self._library, self._all_devices = graphs, library, devices
        self._timed = {graph.region.name for graph in graphs}
        self._events: list[Event] = []
        self._spans: list[tuple[tuple[str, int], Event, Event]] = []
        self._was_repeated = False

    def instrument(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        """Called by TVM before and after each bytecode call."""
        if peer_call.is_repeated and not self._was_repeated:  # the first call has only made graphs
            self._was_repeated = True
            self._own, self._spans, self._begin = {}, [], 0.0
        now = time.perf_counter()
        key, stream = (symbol, self._device(symbol, args)), self._stream(symbol, args)
        if before:
            self._begin = self._begin or now
            self._stack.append((now, []))
            if stream is not None:
                self._events.append(stream.record(timed=True))
            return _RUN
        start, inner = self._stack.pop()
        if self._stack:
            self._stack[-1][1].append(now - start)
        if stream is not None:
            self._spans.append((key, self._events.pop(), stream.record(timed=True)))
        elif symbol not in self._timed:
            self._own.setdefault(key, []).append(now - start - sum(inner))
        return _RUN

    def _stream(self, symbol: str, args: Sequence[Any]) -> Stream | None:
        """The stream of a GPU that a kernel or a copy uses; None for graphs, which have events of their own."""
        if symbol in self._timed or not (symbol in _TRANSFERS or symbol in self._metadata.dispatches):
            return None
        device = self._all_devices[self._device(symbol, args)]
        if symbol in _TRANSFERS and isinstance(args[0], runtime.Tensor) and args[0].device.dlpack_device_type() == CUDA:
            device = args[0].device
        return Stream.current(self._library, device) if device.dlpack_device_type() == CUDA else None

    def profile(self, function: str) -> Profile:
        """Wait for the end of the call; returns the rows, longest first."""
        for device in self._devices:
            Stream.current(self._library, device).synchronize()
        self._end = time.perf_counter()
        for key, begin, end in self._spans:
            self._own.setdefault(key, []).append(end.milliseconds_since(begin) / 1e3)
        for graph in self._graphs:
            for command, microseconds in graph.times():
                self._add_command(graph.region.name, command, microseconds / 1e6)
        return super().profile(function)

    def _measured(self, rows: Sequence[ProfileRow]) -> float:
        """The part of the call that the rows of one device measure, as devices work at the same time."""
        names = {row.device for row in rows}
        return max((sum(row.microseconds for row in rows if row.device == name) for name in names), default=0.0)


def _buffer_row(region: RegionSpec, metadata: Metadata) -> ProfileRow:
    """The row of a whole command buffer, without its times."""
    kernels = [metadata.dispatches[c.kernel] for c in region.commands if isinstance(c, Dispatch)]
    ops = tuple(op for kernel in kernels for op in kernel.ops)
    precisions = ", ".join(dict.fromkeys(kernel.precision for kernel in kernels if kernel.operations))
    work = sum(kernel.operations for kernel in kernels), sum(kernel.bytes for kernel in kernels), precisions
    return ProfileRow(region.name, device_names(metadata.devices)[region.device], ops, 0, 0.0, 0.0, *work)


class BufferClock:
    """Clock of the time that a machine's calls spend in command buffers, other kernels and transfers.

    Calls over GPUs of a mesh are timed from their first command buffer to the end of the last one on any GPU.
    `metadata`: metadata of the machine's executable. `devices`: the machine's.
    """

    def __init__(self, metadata: Metadata, devices: Sequence[runtime.Device]) -> None:
        self.seconds = self.own = 0.0  # time in them over all calls so far, and time that the clock itself took
        self._timed = {*_TRANSFERS, *metadata.dispatches, *(region.name for region in metadata.regions)}
        self._waiting = _Waiting.of(metadata)  # timed together, from the GPU's begin to the CPU's end
        self._is_open = False
        self._devices = [device for device in devices if device.dlpack_device_type() != CPU]
        self._begin = 0.0
        self._gpu_spans: list[tuple[Stream, Event, Event]] = []  # a begin and an end on each GPU of a mesh

    def instrument(self, function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        """Called by TVM before and after each bytecode call."""
        entered = now = time.perf_counter()
        if peer_call.uses_peers:  # then nothing may wait for a GPU
            if symbol in self._timed:
                self._record(before)
                self.own += time.perf_counter() - entered
            return _RUN
        is_timed = symbol in self._timed and not (self._is_open and (before or symbol not in self._waiting.on_cpu))
        if is_timed:
            self._is_open = before and symbol in self._waiting.on_gpu
            for device in self._devices:
                device.sync()
            now = time.perf_counter()
            if before:
                self._begin = time.perf_counter()
                self.own += self._begin - entered
                return _RUN
            self.seconds += now - self._begin
        self.own += time.perf_counter() - now
        return _RUN

    def _record(self, before: bool) -> None:
        if before and not self._gpu_spans:
            library = cuda_library()
            assert library is not None, "a mesh of GPUs has a driver"
            streams = [Stream.current(library, device) for device in self._devices]
            self._gpu_spans = [(each, each.record(timed=True), each.record(timed=True)) for each in streams]
        elif not before:
            for stream, _, end in self._gpu_spans:
                end.record(stream)

    def stop(self) -> None:
        """Wait for GPUs of a mesh, and add their time."""
        for _, _, end in self._gpu_spans:
            end.synchronize()
        self.seconds += max((end.milliseconds_since(begin) for _, begin, end in self._gpu_spans), default=0.0) / 1e3
        self._gpu_spans = []
