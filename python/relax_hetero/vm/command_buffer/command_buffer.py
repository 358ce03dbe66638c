"""Command buffers recorded by hand: kernels, copies and fills, submitted any number of times with other memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ...artifact.commands import RegionSpec
from ...artifact.dims import parse_dim
from ...errors import BindingError
from ..machine import VirtualMachine
from .arguments import as_numbers
from .binding_table import BindingTable, bind, check_size
from .limits import all_hold
from .operands import parameter_name, size_name
from .recorder import Recording
from .recording import READY, RECORDING, Recordable
from .runners import check_device_kind, runner_for
from .submission import Submission

ONE_SHOT, REUSABLE = "one-shot", "reusable"


class CommandBuffer(Recordable):
    """Commands for one device, recorded once and submitted with a binding table each time.

    ``begin()``, then commands, then ``end()``, then ``submit`` as often as wanted, from any thread, also while earlier
    submissions run. Where the compiler is at hand `end` makes one function of the commands; elsewhere each submission
    walks them.

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
        super().__init__(machine, device, slots, parameters, may_overlap)
        check_device_kind(machine, self.index)
        self.mode = mode
        self._recording: Recording | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CommandBuffer on {self.device_name}, {self.mode}, {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise BindingError("a CommandBuffer cannot be pickled or copied: record one in each process")

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
        sizes = [size_name(slot) for slot in range(self._slots)]
        needs = [(slot, parse_dim(str(spec.nbytes)).names) for slot, spec in enumerate(recording.slots)]
        self._asked = tuple(slot for slot, names in needs if not names <= set(sizes))  # `bind` checks the others
        conditions = [limit.condition for limit in recording.limits]
        conditions += [f"{recording.slots[slot].nbytes} <= {sizes[slot]}" for slot in self._asked]
        names = [parameter_name(index) for index in range(self._parameters)]
        self._holds = all_hold(conditions, [*names, *sizes]) if conditions else None
        self._recording, self.state = recording, READY

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
        if self._holds is not None and not self._holds(*numbers, *table.sizes):
            self._refuse(table, numbers)
        if self.mode == ONE_SHOT:
            with self._lock:
                self.require("submitted", READY)
                self.state = "submitted"
        return self._runner(table, numbers)

    def _recorded(self, what: str) -> Recording:
        if self._recording is None:
            self.require(what, READY)
        assert self._recording is not None
        return self._recording

    def _refuse(self, table: BindingTable, numbers: Sequence[int | float]) -> None:
        """Raise for the condition that a submission's numbers break."""
        values: dict[str, Any] = dict(table.values)
        values.update((parameter_name(index), number) for index, number in enumerate(numbers))
        for limit in table.recording.limits:
            limit.check(values)
        for slot in self._asked:
            check_size(table, slot, values)
