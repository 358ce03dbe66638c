"""Runs: maximal sequences of a block's kernel calls on one device, which become one command buffer each.

Views and tuple fields of a run's results join it. Other bindings without side effects move before the run if they read
none of its results, else after it. A run ends where a transfer, or a kernel that command buffers cannot call, reads its
results, and at every binding with possible side effects (control flow, unknown functions). Runs of several devices are
open at the same time, and so are runs of several parts of one device's work (`device_partition`): a run waits for no
transfer that its first kernel does not need.

A transfer between devices is in order with all work of both, so none may come between the kernels of a sum: one device
would wait for the transfer, which waits for the other one's kernel, which waits for that of the first device.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import tvm
from tvm import relax

from ...target.vdevice import physical
from ..ir.blocks import Block, is_without_effect, used_vars
from ..ir.extents import known_extents
from ..ir.op_names import RESHAPE, TRANSFERS
from ..ir.rewriting import op_name
from ..partition.device_partition import BindingDevices, DevicePartition
from .kernel_calls import KernelCall, KernelCalls

MIN_RUN_CALLS = 2  # minimum kernels of a run: a command buffer of one kernel saves no call

MAX_CALLS = 256
"""Kernels of a run at most. LLVM's time grows faster than the length of a host function and the number of its tensors,
and the cost of one more call for so many kernels is negligible."""


@dataclass
class Run:
    """Bindings that become a command buffer."""

    vdevice: relax.VDevice  # device of the kernels
    members: list[int] = field(default_factory=list)  # indices of the bindings, in order
    calls: dict[int, KernelCall] = field(default_factory=dict)  # kernel calls by index; the other members are views
    ended_by: int | None = None  # index of the binding that ended it; None for the end of the block


@dataclass
class _Section:
    """A run, and the bindings between the previous section and it."""

    before: list[int] = field(default_factory=list)
    run: Run | None = None

    def in_order(self) -> list[int | Run]:
        if self.run is None:
            return [*self.before]
        calls = self.run.calls.values()
        is_small = len(calls) < MIN_RUN_CALLS and not any(call.has_peers for call in calls)
        return [*self.before, *(self.run.members if is_small else [self.run])]


class RunFinder:
    """Finds the runs in the blocks of a module.

    `mod`: placed module of dispatches (FormDispatches). `separate_kernels`: True if kernels of llvm devices are
    compiled separately (`KernelCalls`).
    """

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool = False) -> None:
        self.calls = KernelCalls(mod, separate_kernels)
        self._devices = BindingDevices(mod)

    def cut(self, block: Block, free: Set[relax.Var] = frozenset()) -> list[int | Run]:
        """The block's bindings in a valid order: indices of single bindings, and runs.

        `free`: variables from outside of the block that kernels may overwrite: nothing else uses them.
        """
        split = _Split(block, free)
        parts = DevicePartition(block.bindings, self._devices).part_of
        for index, binding in enumerate(block.bindings):
            call = self.calls.of(binding)
            if call is not None and split.may_work(index, call, parts[index]):
                split.work(index, call, parts[index])
            elif not (is_view(binding) and split.view(index)):
                split.other(index)
        return [item for section in split.sections for item in section.in_order()]


class _Split:
    """Sections of a block, in order; the last one has no run.

    A variable's stage is twice the number of its section, plus one if the section's run defines it.
    """

    def __init__(self, block: Block, free: Set[relax.Var]) -> None:
        self.sections = [_Section()]
        self._block, self._free = block, free
        self._stages: dict[relax.Var, int] = {}
        self._open: dict[int, int] = {}
        self._sums: list[dict[tuple[int, int], int]] = []  # sections of each sum's kernels, by device
        self._last_transfer = 0

    def work(self, index: int, call: KernelCall, part: int) -> None:
        """Add a kernel to the open run of its part, or to a new run if it reads a later result.

        Kernels that wait for those of other devices do not move before a transfer.
        """
        number = self._open.get(part)
        run = None if number is None else self.sections[number].run
        is_full = run is not None and len(run.calls) >= MAX_CALLS
        is_early = number is not None and call.has_peers and number < self._last_transfer
        if number is None or is_full or is_early or self._read(index) > 2 * number + 1:
            self._end(part, index)
            number = self._open[part] = len(self.sections) - 1
            self.sections[number].run = Run(call.vdevice)
            self.sections.append(_Section())
        self._join(number, index).calls[index] = call
        if call.has_peers:
            device = physical(call.vdevice)
            if not self._sums or device in self._sums[-1]:
                self._sums.append({})
            self._sums[-1][device] = number

    def may_work(self, index: int, call: KernelCall, part: int) -> bool:
        """Return whether a kernel may join a run: only the run uses the operands that it overwrites."""
        stage = 2 * self._open[part] + 1 if part in self._open else -1
        return all(self._is_own(call.reads[operand], index, stage) for _, operand in call.stored_over)

    def _is_own(self, var: relax.Var, index: int, stage: int) -> bool:
        """Return whether memory that binding `index` would overwrite is of one stage, or free, and used there only."""
        root = var
        while root in self._block.positions and is_view(self._block.bindings[self._block.positions[root]]):
            value = self._block.definitions[root]
            root = value.args[0] if isinstance(value, relax.Call) else getattr(value, "tuple_value", value)
        pending = [root]
        while pending:
            alias = pending.pop()
            users = [user for user in self._block.users.get(alias, []) if user != index]
            views = {user for user in users if is_view(self._block.bindings[user])}
            if not (alias in self._free or self._block.is_local(alias)) or max(users, default=-1) > index:
                return False
            if any(self._stages[self._block.bindings[user].var] != stage for user in users if user not in views):
                return False
            pending += [self._block.bindings[user].var for user in views]
        # Command buffers take memory from outside as it is, not in the shape of a view.
        return (root in self._free and root.same_as(var)) or self._stages.get(root) == stage

    def view(self, index: int) -> bool:
        """Add a view to the open run that defines its source; returns False if there is none."""
        number, is_in_run = divmod(self._read(index), 2)
        if not is_in_run or number not in self._open.values():
            return False
        self._join(number, index)
        return True

    def other(self, index: int) -> None:
        """Move any other binding before the open runs if it may, else to the end."""
        binding = self._block.bindings[index]
        first = min(self._open.values(), default=len(self.sections) - 1)
        is_transfer = op_name(binding.value) in TRANSFERS
        divides_sum = any(min(each.values()) < first <= max(each.values()) for each in self._sums)
        goes_before = self._read(index) <= 2 * first and not (is_transfer and divides_sum)
        number = first if goes_before and is_without_effect(binding) else len(self.sections) - 1
        self.sections[number].before.append(index)
        self._stages[binding.var] = 2 * number
        if is_transfer:
            self._last_transfer = max(self._last_transfer, number)
        if not is_without_effect(binding) or (isinstance(binding, relax.MatchCast) and not goes_before):
            self._end_all(index)
        elif not goes_before and isinstance(binding.value, relax.Call):
            self._end_read(index)

    def _read(self, index: int) -> int:
        """The last stage that a binding reads."""
        return max((self._stages.get(var, 0) for var in used_vars(self._block.bindings[index].value)), default=0)

    def _join(self, number: int, index: int) -> Run:
        run = self.sections[number].run
        assert run is not None, "the section has a run"
        run.members.append(index)
        self._stages[self._block.bindings[index].var] = 2 * number + 1
        return run

    def _end(self, part: int, by: int) -> None:
        if part in self._open:
            run = self.sections[self._open.pop(part)].run
            assert run is not None, "open sections have a run"
            run.ended_by = by

    def _end_all(self, by: int) -> None:
        for part in list(self._open):
            self._end(part, by)

    def _end_read(self, by: int) -> None:
        read = {self._stages.get(var, 0) for var in used_vars(self._block.bindings[by].value)}
        for part, number in list(self._open.items()):
            if 2 * number + 1 in read:
                self._end(part, by)


def is_view(binding: relax.Binding) -> bool:
    """Return whether a binding is a reshape, an alias or a tuple field of a variable."""
    value = binding.value
    if not isinstance(binding, relax.VarBinding):
        return False
    if op_name(value) == RESHAPE:
        return isinstance(value.args[0], relax.Var) and known_extents(binding.var.ty) is not None
    return isinstance(value, (relax.Var, relax.TupleGetItem))
