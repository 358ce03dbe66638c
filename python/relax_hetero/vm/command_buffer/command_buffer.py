"""Command buffers recorded by hand: kernels, copies and fills, submitted repeatedly with different bindings."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...artifact.commands import DIRECT, SLOT, RegionSpec
from ...artifact.dims import parse_dim
from ...artifact.metadata import device_names
from ...errors import BindingError, HeteroError
from ..device.devices import find_entry
from ..machine import VirtualMachine
from ..region.walk_commands import Kernel
from .binding_table import BindingTable, bind, check_size
from .borrowed_buffer import borrow, check_device
from .operands import (
    Integer,
    MemoryRange,
    Number,
    as_count,
    as_grid,
    as_numbers,
    as_pairs,
    as_pattern,
    integer,
    parameter_name,
    size_name,
)
from .recorder import Recorder, Recording, dispatch_arguments
from .runners import Submission, check_device_kind, runner_for

NEW, RECORDING, READY = "new", "recording", "ready"
ONE_SHOT, REUSABLE = "one-shot", "reusable"


class CommandBuffer:
    """Commands for one device, recorded once and submitted with a binding table each time.

    Call ``begin()``, commands, ``end()``, and then ``submit`` any number of times, from any thread, even while earlier
    submissions run. On CPUs `end` compiles the commands into one function if the compiler is available; otherwise each
    submission interprets them. On CUDA devices repeated submissions of one table replay a CUDA graph.

    Parameters
    ----------
    machine : VirtualMachine
        Virtual machine whose kernels it runs.
    device : str, int or VDevice
        Manifest entry (``"llvm:0"``); by default the first.
    slots, parameters : int
        Number of slots and number of parameters of each submission. A slot that no command uses may stay empty.
    mode : str
        ``"reusable"``, or ``"one-shot"`` for a single submission.
    may_overlap : sequence of (int, int)
        Pairs of slots whose bindings may overlap although commands write them; ``(i, i)`` for a slot that one command
        both reads and writes.

    Attributes
    ----------
    machine : VirtualMachine
        Virtual machine whose kernels it runs.
    device : Device
        Device that runs the commands.
    index : int
        Index of the device in the manifest.
    device_name : str
        Name of the device in messages.
    mode : str
        ``"reusable"`` or ``"one-shot"``.
    state : str
        ``"new"``, ``"recording"``, ``"ready"``, or ``"submitted"`` for a submitted one-shot buffer.

    Raises
    ------
    BindingError
        An unknown device, one whose kind does not support command buffers, or invalid counts, modes and pairs.
    """

    def __init__(
        self,
        machine: VirtualMachine,
        device: object = 0,
        slots: int = 0,
        parameters: int = 0,
        mode: str = REUSABLE,
        may_overlap: Sequence[tuple[int, int]] = (),
    ) -> None:
        if not isinstance(machine, VirtualMachine):
            raise BindingError(f"CommandBuffer takes a VirtualMachine, found {type(machine).__name__}")
        if mode not in (ONE_SHOT, REUSABLE):
            raise BindingError(f"mode is {mode!r}, expected {REUSABLE!r} or {ONE_SHOT!r}")
        self.machine, self.mode, self.state = machine, mode, NEW
        self.index = find_entry(device, machine.executable.devices)
        self.device = machine.devices[self.index]
        self.device_name = device_names(machine.executable.devices)[self.index]
        self._slots, self._parameters = as_count(slots, "slots"), as_count(parameters, "parameters")
        self._recorder = Recorder(self.index, self._slots, self._parameters, as_pairs(may_overlap, slots))
        check_device_kind(machine, self.index)
        self._recording: Recording | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CommandBuffer on {self.device_name}, {self.mode}, {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise BindingError("a CommandBuffer cannot be pickled or copied: record one in each process")

    # Operands.

    def slot(self, index: int, offset: Integer = 0, length: Integer | None = None) -> MemoryRange:
        """A range of the memory that each submission binds to a slot: an indirect reference.

        Parameters
        ----------
        index : int
            Slot of the binding table.
        offset, length : int or a number made of parameters
            Bytes from the beginning of the binding. The length None means as many bytes as the command needs, or all
            bytes from `offset` on if the command does not determine them.
        """
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self._slots:
            raise BindingError(f"slot {index!r} is not among the {self._slots} slots of {self!r}")
        return self._memory_range(SLOT, index, offset, length, f"slot {index}")

    def buffer(self, tensor: object, offset: Integer = 0, length: Integer | None = None) -> MemoryRange:
        """A range of memory that is the same in each submission: a direct reference, which keeps the memory alive.

        Parameters
        ----------
        tensor : numpy array, tvm tensor or object with ``__dlpack__``
            Contiguous, on this buffer's device.
        offset, length : int or a number made of parameters
            Bytes; see `slot`.
        """
        self.require("recorded into", NEW, RECORDING)
        borrowed = borrow(tensor, "the buffer")
        check_device(borrowed, self.device, self.device_name, "the buffer")
        index = self._recorder.keep(borrowed)
        return self._memory_range(DIRECT, index, offset, length, f"buffer {index}")

    def parameter(self, index: int) -> Number:
        """A number that each submission provides.

        It may be used wherever an int is expected (extents, offsets, lengths, workgroup counts, integer scalars), also
        in arithmetic with ints and other parameters, and as a kernel's floating-point scalar.

        Parameters
        ----------
        index : int
            Index in the parameters of a submission.
        """
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self._parameters:
            raise BindingError(f"parameter {index!r} is not among the {self._parameters} parameters of {self!r}")
        return Number(parameter_name(index))

    # Recording.

    def begin(self) -> None:
        """Begin recording; allowed once."""
        self.require("begun", NEW)
        self.state = RECORDING

    def fill(self, target: MemoryRange, pattern: bytes | float, dtype: str | None = None) -> None:
        """Record a fill: repeat a pattern of 1, 2, 4 or 8 bytes over a range, whose length is a multiple of that.

        Parameters
        ----------
        target : MemoryRange
            Range to write.
        pattern : bytes, number or numpy scalar
            The bytes of one element; a Python number other than 0 needs `dtype`.
        dtype : str, optional
            TVM's name of an element type.
        """
        self.require("recorded into", RECORDING)
        self._recorder.fill(self._checked_range(target, "the target of fill"), as_pattern(pattern, dtype))

    def copy(self, source: MemoryRange, target: MemoryRange) -> None:
        """Record a copy of as many bytes as either range specifies, else all bytes of `source`.

        Parameters
        ----------
        source, target : MemoryRange
            Ranges to read and to write.
        """
        self.require("recorded into", RECORDING)
        self._recorder.copy(
            self._checked_range(source, "the source of copy"), self._checked_range(target, "the target of copy")
        )

    def barrier(self) -> None:
        """Make the results of earlier commands visible to later ones; not needed on CPUs, which run them in order."""
        self.require("recorded into", RECORDING)
        self._recorder.barrier()

    def dispatch(
        self,
        kernel: str | Kernel,
        grid: Integer | Sequence[Integer],
        operands: Sequence[MemoryRange],
        scalars: Mapping[str, Any] | Sequence[Any] = (),
        *,
        when: MemoryRange | None = None,
        unless: MemoryRange | None = None,
    ) -> None:
        """Record a kernel call.

        Parameters
        ----------
        kernel : str or Kernel
            Name in the executable, or a result of `VirtualMachine.kernel`.
        grid : int or sequence of one to three
            Workgroup counts along x, y, z. A kernel with workgroup indices (attribute ``relax_hetero.workgroups``)
            runs once for each; any other runs once if all counts are positive. Zero skips the command.
        operands : sequence of MemoryRange
            One for each tensor parameter, in order.
        scalars : sequence or mapping by name
            Values of symbolic extents, then of scalar parameters, without workgroup indices.
        when, unless : MemoryRange, optional
            An int32 that is read when the command runs, which is skipped if `when` is zero or `unless` is not.

        Raises
        ------
        BindingError
            An operand does not fit the kernel. Conditions on bindings and parameters are checked at submission.
        """
        self._dispatch(self._load_kernel(kernel), as_grid(grid), None, operands, scalars, when, unless)

    def dispatch_indirect(
        self,
        kernel: str | Kernel,
        count: MemoryRange,
        operands: Sequence[MemoryRange],
        scalars: Mapping[str, Any] | Sequence[Any] = (),
        *,
        when: MemoryRange | None = None,
        unless: MemoryRange | None = None,
    ) -> None:
        """Record a kernel call whose workgroup counts are read from memory when the command runs.

        Parameters
        ----------
        kernel, operands, scalars, when, unless
            As in `dispatch`.
        count : MemoryRange
            Workgroup counts along x, y, z, each an int32: one to three by the length of the range; without a length, as
            many as the kernel has workgroup indices, at least one. An earlier command may write them. Zero or less
            skips the command.
        """
        loaded = self._load_kernel(kernel)
        counts = self._checked_range(count, "the count")
        nbytes = counts.length if counts.length is not None else 4 * max(1, loaded.spec.workgroups)
        if nbytes not in (4, 8, 12):
            raise BindingError(f"the count of kernel {loaded.spec.name!r} has {nbytes} bytes, expected 4, 8 or 12")
        self._dispatch(loaded, (1,) * (int(nbytes) // 4), counts, operands, scalars, when, unless)

    def end(self, compiled: bool = True) -> None:
        """End recording, and prepare for submissions.

        Parameters
        ----------
        compiled : bool
            Whether to compile the commands to machine code if the compiler is available. Compilation takes tens of
            milliseconds, and saves about a microsecond per command in each submission.
        """
        self.require("ended", RECORDING)
        recording = self._recorder.finish()
        self._runner = runner_for(self.machine, recording, compiled)
        sizes = {size_name(slot) for slot in range(self._slots)}
        names_in_size = [parse_dim(str(spec.nbytes)).names for spec in recording.slots]
        # Slots whose required size depends on parameters; `bind` checks the others.
        self._sized_by_parameters = tuple(slot for slot, names in enumerate(names_in_size) if not names <= sizes)
        self._recording, self.state = recording, READY

    # Submitting.

    @property
    def spec(self) -> RegionSpec:
        """The commands and the requirements of each slot, as plain data; HeteroError before `end`."""
        recording = self._require_recording("described")
        return RegionSpec(
            name="command_buffer", function="", device=self.index, slots=recording.slots,
            parameters=tuple(parameter_name(index) for index in range(self._parameters)),
            directs=tuple(range(len(recording.directs))), arena=0,
            commands=recording.commands, runs=self._runner.runs,
        )  # fmt: skip

    def bind(self, bindings: Mapping[int, Any] | Sequence[Any]) -> BindingTable:
        """Check bindings and make a table of them, for any number of submissions.

        Parameters
        ----------
        bindings : mapping from slots, or sequence by slot
            Contiguous buffers (numpy arrays, tvm tensors, objects with ``__dlpack__``) or ``(buffer, offset, length)``
            in bytes, kept alive by the table; slots that no command uses may be None or absent.

        Raises
        ------
        BindingError
            Too few bytes, another element type (unless kernels differ in it, or the memory is ``uint8``), a misaligned
            address, another device, read-only memory that commands write, or overlapping bindings, one of which
            commands write. The message names the slot and its requirement (`SlotSpec`).
        """
        return bind(self._require_recording("bound"), bindings, self.device, self.device_name)

    def submit(self, bindings: Any = (), parameters: Sequence[int | float] = ()) -> Submission:
        """Run the commands; on a CPU they have ended on return.

        Parameters
        ----------
        bindings : BindingTable, mapping or sequence
            Table of this command buffer, or arguments of `bind`.
        parameters : sequence of numbers
            Value of each parameter.

        Raises
        ------
        BindingError
            Bindings or parameters that do not fit; no command has run.
        HeteroError
            A kernel fails (later commands do not run), or a one-shot buffer is submitted a second time.
        """
        recording = self._require_recording("submitted")
        table = bindings if bindings.__class__ is BindingTable else self.bind(bindings)
        if table.recording is not recording:
            raise BindingError(
                "the BindingTable is another command buffer's, expected one made by this command buffer's bind"
            )
        numbers = as_numbers(parameters, recording.parameters) if self._parameters or len(parameters) else ()
        if recording.limits or self._sized_by_parameters:
            self._check_numbers(table, numbers)
        if self.mode == ONE_SHOT:
            with self._lock:
                self.require("submitted", READY)
                self.state = "submitted"
        return self._runner(table, numbers)

    def require(self, what: str, *states: str) -> None:
        """Require that the recording is in one of `states`; HeteroError otherwise.

        Parameters
        ----------
        what : str
            Past participle for the message, such as "recorded into".
        *states : str
            Permitted values of `state`.
        """
        if self.state not in states:
            raise HeteroError(f"a command buffer is {what} that is {self.state}, expected {' or '.join(states)}")

    def _memory_range(self, space: str, index: int, offset: Integer, length: Integer | None, what: str) -> MemoryRange:
        begin = integer(offset, f"the offset in {what}")
        return MemoryRange(
            self, space, index, begin, None if length is None else integer(length, f"the length in {what}")
        )

    def _checked_range(self, memory: object, what: str) -> MemoryRange:
        if not isinstance(memory, MemoryRange):
            expected = "expected slot(...) or buffer(...) of this command buffer"
            raise BindingError(f"{what} is a {type(memory).__name__}, {expected}")
        if memory.owner is not self:
            raise BindingError(f"{what} is a range of another command buffer")
        return memory

    def _load_kernel(self, kernel: object) -> Kernel:
        loaded = self.machine.kernel(kernel) if isinstance(kernel, str) else kernel
        if not isinstance(loaded, Kernel):
            raise BindingError(
                f"a kernel is a {type(kernel).__name__}, expected its name or VirtualMachine.kernel(name)"
            )
        executable = self.machine.executable
        if loaded.code is not executable.runnable_module():  # names and devices differ between executables
            raise BindingError(f"kernel {loaded.spec.name!r} is another executable's, expected one of {executable!r}")
        devices = executable.devices
        if devices[loaded.spec.device].target != devices[self.index].target:  # devices with equal targets share code
            compiled_for = device_names(devices)[loaded.spec.device]
            raise BindingError(
                f"kernel {loaded.spec.name!r} was compiled for {compiled_for}, expected {self.device_name}"
            )
        return loaded

    def _dispatch(
        self,
        kernel: Kernel,
        grid: tuple[Integer, ...],
        count: MemoryRange | None,
        operands: Sequence[MemoryRange],
        scalars: Mapping[str, Any] | Sequence[Any],
        when: MemoryRange | None,
        unless: MemoryRange | None,
    ) -> None:
        self.require("recorded into", RECORDING)
        name = kernel.spec.name
        if not isinstance(operands, Sequence):
            raise BindingError(f"kernel {name!r} is given a {type(operands).__name__}, expected a sequence of operands")
        ranges = [self._checked_range(memory, f"operand {i} of kernel {name!r}") for i, memory in enumerate(operands)]
        predicates = [
            None if memory is None else self._checked_range(memory, f"{what} of kernel {name!r}")
            for what, memory in (("when", when), ("unless", unless))
        ]
        self._recorder.dispatch(dispatch_arguments(kernel, ranges, scalars), grid, count, *predicates)

    def _require_recording(self, what: str) -> Recording:
        if self._recording is None:
            self.require(what, READY)
        assert self._recording is not None
        return self._recording

    def _check_numbers(self, table: BindingTable, numbers: Sequence[int | float]) -> None:
        """Require that bindings and parameters of a submission are within limits; BindingError otherwise."""
        values: dict[str, Any] = dict(table.values)
        values.update((parameter_name(index), number) for index, number in enumerate(numbers))
        for limit in table.recording.limits:
            limit.check(values)
        for slot in self._sized_by_parameters:
            check_size(table, slot, values)
