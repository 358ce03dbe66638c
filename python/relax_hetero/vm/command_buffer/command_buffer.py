"""Command buffers recorded by hand: kernels, copies and fills, submitted any number of times with other memory."""

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

    ``begin()``, then commands, then ``end()``, then ``submit`` as often as wanted, from any thread, also while earlier
    submissions run. On CPUs, where the compiler is at hand, `end` makes one function of the commands; elsewhere each
    submission walks them. On CUDA devices those of a table that comes again are a CUDA graph.

    Parameters
    ----------
    machine : VirtualMachine
        Whose kernels it runs.
    device : str, int or VDevice
        An entry of the manifest (``"llvm:0"``); the first by default.
    slots, parameters : int
        How many bindings, and how many numbers, come with each submission. A slot that no command uses may stay empty.
    mode : str
        ``"reusable"``, or ``"one-shot"`` for one that can be submitted once.
    may_overlap : sequence of (int, int)
        Pairs of slots whose bindings may share bytes though commands write them; ``(i, i)`` for one slot that a command
        reads and writes.

    Attributes
    ----------
    machine : VirtualMachine
        Machine whose kernels it runs.
    device : Device
        Device that runs the commands.
    index : int
        Index of the device in the manifest.
    device_name : str
        As messages call it.
    mode : str
        ``"reusable"`` or ``"one-shot"``.
    state : str
        ``"new"``, ``"recording"``, ``"ready"``, or ``"submitted"`` for a one-shot buffer that was.

    Raises
    ------
    BindingError
        An unknown device, one of a kind that has no command buffers, or counts, modes and pairs that are none.
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

    # What commands work on.

    def slot(self, index: int, offset: Integer = 0, length: Integer | None = None) -> MemoryRange:
        """A part of what each submission binds to a slot: an indirect reference.

        Parameters
        ----------
        index : int
            Slot of the binding table.
        offset, length : int or a number made of parameters
            Bytes, counted from where the binding begins; None: what the command needs, else all there is.
        """
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self._slots:
            raise BindingError(f"slot {index!r} is not among the {self._slots} slots of {self!r}")
        return self._range(SLOT, index, offset, length, f"slot {index}")

    def buffer(self, tensor: object, offset: Integer = 0, length: Integer | None = None) -> MemoryRange:
        """A part of memory that is the same in each submission, kept alive by this command buffer: a direct reference.

        Parameters
        ----------
        tensor : numpy array, tvm tensor or object with ``__dlpack__``
            Contiguous, on this buffer's device.
        offset, length : int or a number made of parameters
            Bytes; see `slot`.
        """
        self.require("recorded into", NEW, RECORDING)
        lent = borrow(tensor, "the buffer")
        check_device(lent, self.device, self.device_name, "the buffer")
        index = self._recorder.keep(lent)
        return self._range(DIRECT, index, offset, length, f"buffer {index}")

    def parameter(self, index: int) -> Number:
        """A number that comes with each submission.

        It stands for an int where an int is expected (extents, offsets, lengths, workgroup counts, integer scalars), as
        such or in arithmetic with ints and other parameters, and for a float as a kernel's floating-point scalar.

        Parameters
        ----------
        index : int
            Position among the numbers of a submission.
        """
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < self._parameters:
            raise BindingError(f"parameter {index!r} is not among the {self._parameters} parameters of {self!r}")
        return Number(parameter_name(index))

    # Recording.

    def begin(self) -> None:
        """Begin to record; once in a buffer's life."""
        self.require("begun", NEW)
        self.state = RECORDING

    def fill(self, target: MemoryRange, pattern: bytes | float, dtype: str | None = None) -> None:
        """Repeat a pattern of 1, 2, 4 or 8 bytes over a range, whose length is a multiple of it.

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
        self._recorder.fill(self._own(target, "the target of fill"), as_pattern(pattern, dtype))

    def copy(self, source: MemoryRange, target: MemoryRange) -> None:
        """Copy bytes: as many as either range says, else all that `source` has.

        Parameters
        ----------
        source, target : MemoryRange
            Ranges to read and to write.
        """
        self.require("recorded into", RECORDING)
        self._recorder.copy(self._own(source, "the source of copy"), self._own(target, "the target of copy"))

    def barrier(self) -> None:
        """Have later commands see the results of earlier ones. CPUs need none: they run commands in order."""
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
        """Run a kernel.

        Parameters
        ----------
        kernel : str or Kernel
            Its name in the executable, or `VirtualMachine.kernel` of it.
        grid : int or sequence of one to three
            Workgroup counts along x, y, z. A kernel that takes workgroup numbers (attribute
            ``relax_hetero.workgroups``) runs once for each; any other runs once if all counts are positive. Zero skips.
        operands : sequence of MemoryRange
            One for each tensor parameter, in order.
        scalars : sequence or mapping by name
            Values of symbolic extents, then of scalar parameters, without workgroup numbers.
        when, unless : MemoryRange, optional
            An int32 that is read when the command runs: it is skipped where `when` is zero, or `unless` is not.

        Raises
        ------
        BindingError
            An operand does not fit the kernel, as far as it is known now; the rest is asked of bindings and parameters.
        """
        self._dispatch(self._kernel(kernel), as_grid(grid), None, operands, scalars, when, unless)

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
        """Run a kernel as often as memory says when the command runs.

        Parameters
        ----------
        kernel, operands, scalars, when, unless
            As in `dispatch`.
        count : MemoryRange
            One to three int32 workgroup counts, as many as its length says, else as the kernel takes workgroup numbers
            (at least one). An earlier command may have written them. Zero or less skips.
        """
        found = self._kernel(kernel)
        own = self._own(count, "the count")
        number = own.length if own.length is not None else 4 * max(1, found.spec.workgroups)
        if number not in (4, 8, 12):
            raise BindingError(f"the count of kernel {found.spec.name!r} has {number} bytes, expected 4, 8 or 12")
        self._dispatch(found, (1,) * (int(number) // 4), own, operands, scalars, when, unless)

    def end(self, compiled: bool = True) -> None:
        """End recording, and make what submissions run.

        Parameters
        ----------
        compiled : bool
            Whether to make machine code of the commands where the compiler is at hand (tens of milliseconds), which
            saves about a microsecond for each command in each submission.
        """
        self.require("ended", RECORDING)
        recording = self._recorder.finish()
        self._runner = runner_for(self.machine, recording, compiled)
        sizes = {size_name(slot) for slot in range(self._slots)}
        needs = [(slot, parse_dim(str(spec.nbytes)).names) for slot, spec in enumerate(recording.slots)]
        self._asked = tuple(slot for slot, names in needs if not names <= sizes)  # `bind` checks the others
        self._recording, self.state = recording, READY

    # Submitting.

    @property
    def spec(self) -> RegionSpec:
        """The recording as data: commands, and what they require of each slot; HeteroError before `end`."""
        recording = self._recorded("described")
        return RegionSpec(
            "command_buffer", "", self.index, recording.slots,
            tuple(parameter_name(index) for index in range(self._parameters)),
            tuple(range(len(recording.directs))), 0, recording.commands, self._runner.runs,
        )  # fmt: skip

    def bind(self, bindings: Mapping[int, Any] | Sequence[Any]) -> BindingTable:
        """A table of what slots stand for, checked: for any number of submissions, which use the memory as it then is.

        Parameters
        ----------
        bindings : mapping from slots, or sequence by slot
            Contiguous buffers (numpy arrays, tvm tensors, objects with ``__dlpack__``) or ``(buffer, offset, length)``
            in bytes, kept alive by the table; None, or nothing, for slots that no command uses.

        Raises
        ------
        BindingError
            Names the slot, what its commands require (`SlotSpec`) and what was found: too few bytes, another element
            type (one is required where all kernels agree on it; ``uint8`` memory fits any), an address that is not
            aligned, another device, read-only memory that is written, or memory that two slots share and one writes.
        """
        return bind(self._recorded("bound"), bindings, self.device, self.device_name)

    def submit(self, bindings: Any = (), parameters: Sequence[int | float] = ()) -> Submission:
        """Run the commands; on a CPU they have run when this returns.

        Parameters
        ----------
        bindings : BindingTable, mapping or sequence
            A table of this command buffer, or what `bind` takes.
        parameters : sequence of numbers
            One for each parameter.

        Raises
        ------
        BindingError
            Bindings or parameters that do not fit; nothing has run.
        HeteroError
            A kernel that fails, and nothing after it has run; or a one-shot buffer that was submitted before.
        """
        recording = self._recorded("submitted")
        table = bindings if bindings.__class__ is BindingTable else self.bind(bindings)
        if table.recording is not recording:
            raise BindingError("the BindingTable is another command buffer's, expected one that this one's bind made")
        numbers = as_numbers(parameters, recording.parameters) if self._parameters or len(parameters) else ()
        if recording.limits or self._asked:
            self._check(table, numbers)
        if self.mode == ONE_SHOT:
            with self._lock:
                self.require("submitted", READY)
                self.state = "submitted"
        return self._runner(table, numbers)

    def require(self, what: str, *states: str) -> None:
        """HeteroError unless the recording is in one of these states.

        Parameters
        ----------
        what : str
            Participle for the message, such as "recorded into".
        *states : str
            Permitted values of `state`.
        """
        if self.state not in states:
            raise HeteroError(f"a command buffer is {what} that is {self.state}, expected {' or '.join(states)}")

    def _range(self, space: str, index: int, offset: Integer, length: Integer | None, what: str) -> MemoryRange:
        begin = integer(offset, f"the offset in {what}")
        return MemoryRange(
            self, space, index, begin, None if length is None else integer(length, f"the length in {what}")
        )

    def _own(self, memory: object, what: str) -> MemoryRange:
        if not isinstance(memory, MemoryRange):
            expected = "expected slot(...) or buffer(...) of this command buffer"
            raise BindingError(f"{what} is a {type(memory).__name__}, {expected}")
        if memory.owner is not self:
            raise BindingError(f"{what} is a range of another command buffer")
        return memory

    def _kernel(self, kernel: object) -> Kernel:
        found = self.machine.kernel(kernel) if isinstance(kernel, str) else kernel
        if not isinstance(found, Kernel):
            raise BindingError(
                f"a kernel is a {type(kernel).__name__}, expected its name or VirtualMachine.kernel(name)"
            )
        executable = self.machine.executable
        if found.code is not executable.runnable():  # its name and its device are another executable's
            raise BindingError(f"kernel {found.spec.name!r} is another executable's, expected one of {executable!r}")
        devices = executable.devices
        if devices[found.spec.device].target != devices[self.index].target:  # equal devices share code
            compiled_for = device_names(devices)[found.spec.device]
            raise BindingError(
                f"kernel {found.spec.name!r} was compiled for {compiled_for}, expected {self.device_name}"
            )
        return found

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
        own = [self._own(memory, f"operand {i} of kernel {name!r}") for i, memory in enumerate(operands)]
        predicates = [
            None if memory is None else self._own(memory, f"{what} of kernel {name!r}")
            for what, memory in (("when", when), ("unless", unless))
        ]
        self._recorder.dispatch(dispatch_arguments(kernel, own, scalars), grid, count, *predicates)

    def _recorded(self, what: str) -> Recording:
        if self._recording is None:
            self.require(what, READY)
        assert self._recording is not None
        return self._recording

    def _check(self, table: BindingTable, numbers: Sequence[int | float]) -> None:
        """BindingError for a limit that a submission's numbers break."""
        values: dict[str, Any] = dict(table.values)
        values.update((parameter_name(index), number) for index, number in enumerate(numbers))
        for limit in table.recording.limits:
            limit.check(values)
        for slot in self._asked:
            check_size(table, slot, values)
