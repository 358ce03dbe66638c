"""Which bindings of a block become one command buffer: maximal runs of work on one device.

Work is a call of a kernel. What costs nothing on the way, views of what the run made and fields of it, joins. What is
not work and has no effect moves out of the way: before the run if it reads nothing of it, else behind it. A run ends
where something reads it that does work elsewhere (a transfer, a kernel that no buffer can call), and at everything that
may have an effect (control flow, unknown functions). Runs of several devices grow side by side, and so do those of the
parts of one device's work (`device_partition`): a run waits for no transfer that its first kernel does not need.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import tvm
from tvm import relax

from ..ir.blocks import Block, used_vars
from ..ir.extents import known_extents
from ..ir.op_names import CALL_TIR_INPLACE, RESHAPE
from ..ir.rewriting import op_name
from ..partition.device_partition import BindingDevices, DevicePartition
from .kernel_calls import KernelCall, KernelCalls

MIN_RUN_CALLS = 2
"""A run of fewer kernels gains nothing: one call of a buffer stands for one call of a kernel."""

MAX_CALLS = 256
"""Kernels in one run. LLVM takes time that grows faster than the length of a host function, most of all than the number
of its tensors; another call for each so many kernels costs nothing that shows."""


@dataclass
class Run:
    """Bindings that become a command buffer.

    Attributes
    ----------
    vdevice : relax.VDevice
        Where the work is done.
    members : list of int
        Indices of the bindings, in order.
    calls : dict of int to KernelCall
        Those of them that call a kernel; the others are views.
    ended_by : int, optional
        The binding that ended it; None for the end of the block.
    """

    vdevice: relax.VDevice
    members: list[int] = field(default_factory=list)
    calls: dict[int, KernelCall] = field(default_factory=dict)
    ended_by: int | None = None


@dataclass
class _Section:
    """A run, and what stands before it and after the section before."""

    before: list[int] = field(default_factory=list)
    run: Run | None = None

    def in_order(self) -> list[int | Run]:
        if self.run is None:
            return [*self.before]
        is_small = len(self.run.calls) < MIN_RUN_CALLS
        return [*self.before, *(self.run.members if is_small else [self.run])]


class RunFinder:
    """Cuts the blocks of a module into runs.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed, of dispatches (FormDispatches).
    separate_kernels : bool
        As `KernelCalls` has it.
    """

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool = False) -> None:
        self.calls = KernelCalls(mod, separate_kernels)
        self._places = BindingDevices(mod)

    def cut(self, block: Block, free: Set[relax.Var] = frozenset()) -> list[int | Run]:
        """The block's bindings in an order in which they may run: indices of those that stay, and runs.

        Parameters
        ----------
        block : Block
        free : set of relax.Var
            Those that kernels may overwrite though the block does not make them: nothing outside of it uses them.
        """
        cut = _Split(block, free)
        parts = DevicePartition(block.bindings, self._places).part_of
        for index, binding in enumerate(block.bindings):
            call = self.calls.of(binding)
            if call is not None and cut.may_work(index, call, parts[index]):
                cut.work(index, call, parts[index])
            elif not (is_view(binding) and cut.view(index)):
                cut.other(index)
        return [item for section in cut.sections for item in section.in_order()]


class _Split:
    """A block while it is cut: sections in order, the last without a run.

    A variable's place is twice the number of its section, and one more if the section's run makes it.
    """

    def __init__(self, block: Block, free: Set[relax.Var]) -> None:
        self.sections = [_Section()]
        self._block, self._free = block, free
        self._places: dict[relax.Var, int] = {}
        self._open: dict[int, int] = {}

    def work(self, index: int, call: KernelCall, part: int) -> None:
        """A kernel joins the open run of its part, unless it reads something that is made later."""
        number = self._open.get(part)
        run = None if number is None else self.sections[number].run
        is_full = run is not None and len(run.calls) >= MAX_CALLS
        if number is None or is_full or self._read(index) > 2 * number + 1:
            self._end(part, index)
            number = self._open[part] = len(self.sections) - 1
            self.sections[number].run = Run(call.vdevice)
            self.sections.append(_Section())
        self._join(number, index).calls[index] = call

    def may_work(self, index: int, call: KernelCall, part: int) -> bool:
        """True if a kernel may join a run: what it overwrites, if anything, is no one's but the run's until then."""
        made = 2 * self._open[part] + 1 if part in self._open else -1
        return all(self._is_own(call.reads[operand], index, made) for _, operand in call.over)

    def _is_own(self, var: relax.Var, index: int, made: int) -> bool:
        """True if all that binding `index` would overwrite is made in one place or free, and used there alone."""
        root = var
        while root in self._block.positions and is_view(self._block.bindings[self._block.positions[root]]):
            value = self._block.definitions[root]
            root = value.args[0] if isinstance(value, relax.Call) else getattr(value, "tuple_value", value)
        pending = [root]
        while pending:
            shown = pending.pop()
            users = [user for user in self._block.users.get(shown, []) if user != index]
            views = {user for user in users if is_view(self._block.bindings[user])}
            if not (shown in self._free or self._block.is_local(shown)) or max(users, default=-1) > index:
                return False
            if any(self._places[self._block.bindings[user].var] != made for user in users if user not in views):
                return False
            pending += [self._block.bindings[user].var for user in views]
        # What is not the run's own it is given as it is, not in the shape of a view.
        return (root in self._free and root.same_as(var)) or self._places.get(root) == made

    def view(self, index: int) -> bool:
        """A view joins the run that made what it shows; False if none did, or what came since may name sizes in it."""
        number, is_made = divmod(self._read(index), 2)
        if not is_made or number not in self._open.values():
            return False
        self._join(number, index)
        return True

    def other(self, index: int) -> None:
        """Move a binding that is not work before the open runs if it may go there, else to the end."""
        binding = self._block.bindings[index]
        first = min(self._open.values(), default=len(self.sections) - 1)
        goes_before = self._read(index) <= 2 * first
        number = first if goes_before and may_move(binding) else len(self.sections) - 1
        self.sections[number].before.append(index)
        self._places[binding.var] = 2 * number
        if not may_move(binding) or (isinstance(binding, relax.MatchCast) and not goes_before):
            self._end_all(index)
        elif not goes_before and isinstance(binding.value, relax.Call):
            self._end_read(index)

    def _read(self, index: int) -> int:
        """The last place of what a binding reads."""
        return max((self._places.get(var, 0) for var in used_vars(self._block.bindings[index].value)), default=0)

    def _join(self, number: int, index: int) -> Run:
        run = self.sections[number].run
        assert run is not None, "only sections with a run are joined"
        run.members.append(index)
        self._places[self._block.bindings[index].var] = 2 * number + 1
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
        read = {self._places.get(var, 0) for var in used_vars(self._block.bindings[by].value)}
        for part, number in list(self._open.items()):
            if 2 * number + 1 in read:
                self._end(part, by)


def is_view(binding: relax.Binding) -> bool:
    """True if a binding gives the memory of a variable another shape or name, or names one of several results."""
    value = binding.value
    if not isinstance(binding, relax.VarBinding):
        return False
    if op_name(value) == RESHAPE:
        return isinstance(value.args[0], relax.Var) and known_extents(binding.var.ty) is not None
    return isinstance(value, (relax.Var, relax.TupleGetItem))


def may_move(binding: relax.Binding) -> bool:
    """Return whether a binding may run where what it reads is there: it has no effect and no function of its own.

    A match_cast may, as long as what uses the sizes that it names comes later; work in place may not.
    """
    value = binding.value
    if isinstance(value, (relax.If, relax.Function)):
        return False
    if not isinstance(value, relax.Call):
        return True
    is_in_place = op_name(value) == CALL_TIR_INPLACE
    return isinstance(value.op, tvm.ir.Op) and bool(value.op.get_attr("FPurity")) and not is_in_place
