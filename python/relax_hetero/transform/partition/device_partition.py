"""Partition of a function's bindings by device.

A part is a maximal set of bindings on one device with the same transfers before and after them. A transfer, or a
binding that uses several devices (control flow, a call of a function), is a part of its own. A binding without cost,
such as a view, belongs to the part whose result it views. If there is no such part, each reader gets a copy of the
binding. A part whose work takes less time than its submission to a queue is merged into its only reader, or into the
only part that it reads, if both are on one device: this hardly delays any other part.

Transfers that each binding depends on, and transfers that depend on it.

Two bindings on one device with the same transfers before and after them can run together without additional waiting:
the later one needs no device that the earlier one does not need, and no device waits only for the later one. Work
between them has the same transfers before and after it too, so such a set of bindings can run as one step.

A transfer also counts as coming before work if its source is ready whenever that of another transfer before the work
is: it adds no waiting. Likewise a transfer counts as coming after work if all its readers wait for another transfer
that comes after the work.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ...op.require import is_requirement
from ...target.vdevice import host_vdevice, vdevice_index, vdevices_of
from ..ir.blocks import used_vars
from ..ir.kernels import call_vdevice, tensor_bytes
from ..ir.op_names import IN_PLACE, RESHAPE, TRANSFERS
from ..ir.rewriting import global_vars_in, op_name, tensor_types, vdevice_in, walk_bindings
from .written_arguments import overwritten

SMALL_PART_BYTES = 64 << 10
"""Maximum bytes of the tensors of a small part. Its work takes some 10 us, less than its submission to a queue."""

TYPICAL_EXTENT = 64  # value that is assumed for a symbolic extent


@dataclass
class Part:
    """Bindings that run together."""

    devices: tuple[int, ...]  # Devices that it uses. The queue of the first one runs it.
    members: list[int] = field(default_factory=list)  # indices of its bindings, in order
    # True for a single binding that cannot be merged: a transfer, or one that uses several devices.
    is_isolated: bool = False


class DevicePartition:
    """Partition of a sequence of bindings into parts.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        Bindings in program order.
    devices : BindingDevices
        Devices of their module.

    Attributes
    ----------
    bindings : list of relax.Binding
        The bindings, and constants that `bind_constant` added.
    parts : dict of int to Part
        Parts by number.
    part_of : dict of int to int
        From the index of a binding to the number of its part; bindings without a part are missing.
    """

    def __init__(self, bindings: Sequence[relax.Binding], devices: BindingDevices) -> None:
        self.parts: dict[int, Part] = {}
        self.part_of: dict[int, int] = {}
        self.bindings, self._devices = list(bindings), devices
        self._reads = Reads.of(bindings, devices.is_zero_cost)
        self._assign_parts()
        self._merge_small_parts()

    def topological_order(self) -> list[int]:
        """Numbers of the parts, producers first.

        Among ready parts, the one that is followed by the longest chain of isolated parts (transfers) comes first.
        """
        sources = self._sources()
        readers, pending_reads = _reversed(sources), {number: len(parts) for number, parts in sources.items()}
        rank: dict[int, int] = {}
        for number in reversed(_topological_order(readers, pending_reads)):
            rank[number] = max((rank[r] + self.parts[r].is_isolated for r in readers[number]), default=0)
        ready = [(-rank[number], number) for number, count in pending_reads.items() if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[1]
            order.append(number)
            for reader in readers[number]:
                pending_reads[reader] -= 1
                if not pending_reads[reader]:
                    heapq.heappush(ready, (-rank[reader], reader))
        return order

    def add_part(self, index: int) -> None:
        """Make a part of its own for a binding without a part."""
        self._append(self._new_part((self._devices.device(self.bindings[index].value),), False), index)

    def bind_constant(self, var: relax.Var, constant: relax.Expr) -> None:
        """Add a binding of a constant, in a part of its own."""
        self.bindings.append(relax.VarBinding(var, constant))
        self._reads.direct.append([])
        self._reads.producers.append([])
        self.add_part(len(self.bindings) - 1)

    def _assign_parts(self) -> None:
        bindings, lookup = self.bindings, self._devices
        devices = [() if lookup.is_zero_cost(binding) else lookup.devices(binding) for binding in bindings]
        isolated = [len(each) > 1 or is_transfer(binding) for each, binding in zip(devices, bindings, strict=True)]
        # Device of each binding that can share a part; None for isolated bindings and those without cost.
        shared = [each[0] if each and not alone else None for each, alone in zip(devices, isolated, strict=True)]
        dependences = transfer_dependences(bindings, self._reads, shared, isolated)
        numbers: dict[tuple[int, Dependences], int] = {}
        for index, device in enumerate(shared):
            if isolated[index]:
                self._append(self._new_part(devices[index], True), index)
            elif device is None:
                self._append_view(index)
            else:
                key = (device, dependences[index])
                if key not in numbers:
                    numbers[key] = self._new_part((device,), False)
                self._append(numbers[key], index)

    def _new_part(self, devices: tuple[int, ...], is_isolated: bool) -> int:
        number = max(self.parts, default=-1) + 1
        self.parts[number] = Part(devices, is_isolated=is_isolated)
        return number

    def _append(self, number: int, index: int) -> None:
        self.parts[number].members.append(index)
        self.part_of[index] = number

    def _append_view(self, index: int) -> None:
        """Add a binding without cost to the part whose result it views, if it reads nothing else."""
        value = self.bindings[index].value
        reads = self._reads.direct[index]
        sources = {self.part_of.get(read) for read in reads}
        reads_only_bindings = len(reads) == len(used_vars(value))
        source = sources.pop() if len(sources) == 1 and reads_only_bindings else None
        if source is not None and not isinstance(value, relax.Tuple):
            if not is_transfer(self.bindings[self.parts[source].members[0]]):
                self._append(source, index)

    def _producers(self, index: int) -> set[int]:
        """The bindings with a part that a binding reads, directly or through bindings without a part."""
        producers: set[int] = set()
        for read in self._reads.direct[index]:
            producers |= {read} if read in self.part_of else self._producers(read)
        return producers

    def _sources(self) -> dict[int, set[int]]:
        """The parts that each part reads."""
        sources: dict[int, set[int]] = {}
        for number, part in self.parts.items():
            parts = {self.part_of[producer] for index in part.members for producer in self._producers(index)}
            sources[number] = parts - {number}
        return sources

    def _merge_small_parts(self) -> None:
        sources = self._sources()
        readers = _reversed(sources)
        nbytes = {number: self._part_nbytes(part) for number, part in self.parts.items() if not part.is_isolated}
        has_merged = True
        while has_merged:
            has_merged = False
            for number in [number for number, size in nbytes.items() if size <= SMALL_PART_BYTES]:
                for neighbours in (readers[number], sources[number]) if nbytes[number] <= SMALL_PART_BYTES else ():
                    target = next(iter(neighbours)) if len(neighbours) == 1 else -1
                    if target in nbytes and self.parts[target].devices == self.parts[number].devices:
                        self._merge(number, target)
                        _contract(number, target, sources, readers)
                        nbytes[target] += nbytes.pop(number)
                        has_merged = True
                        break

    def _merge(self, number: int, target: int) -> None:
        part = self.parts.pop(number)
        self.parts[target].members = sorted([*self.parts[target].members, *part.members])
        self.part_of |= dict.fromkeys(part.members, target)

    def _part_nbytes(self, part: Part) -> int:
        """Bytes of the tensors that a part reads and defines."""
        total = 0
        for index in part.members:
            binding = self.bindings[index]
            if not self._devices.is_zero_cost(binding):
                if op_name(binding.value) in (None, *OPAQUE_CALLS):
                    return SMALL_PART_BYTES + 1  # unknown work counts as large
                args = binding.value.args
                total += sum(_nbytes(ty) for value in (binding.var, *args) for ty in tensor_types(value.ty))
        return total


def _contract(number: int, target: int, sources: dict[int, set[int]], readers: dict[int, set[int]]) -> None:
    """Contract the edge of a graph between two nodes: merge the node `number` into the node `target`."""
    for edges, reversed_edges in ((sources, readers), (readers, sources)):
        for neighbour in edges.pop(number):
            reversed_edges[neighbour].discard(number)
            if neighbour != target:
                reversed_edges[neighbour].add(target)
                edges[target].add(neighbour)


def _reversed(sources: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The graph with reversed edges."""
    readers: dict[int, set[int]] = {number: set() for number in sources}
    for number, neighbours in sources.items():
        for source in neighbours:
            readers[source].add(number)
    return readers


def _nbytes(ty: relax.TensorType) -> int:
    """Bytes of a tensor; more than `SMALL_PART_BYTES` if its shape is unknown."""
    if not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        return SMALL_PART_BYTES + 1
    return tensor_bytes([_typical(extent) for extent in ty.shape.values[:]], ty.dtype.dtype)


def _typical(extent: Any) -> int:
    """A known extent; an estimate of a dynamic one."""
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    estimate = structural_map(extent, (tirx.Var, lambda var: tirx.IntImm(var.ty.dtype, TYPICAL_EXTENT)))
    return int(tvm.sym.Analyzer().simplify(estimate))


def _topological_order(readers: Mapping[int, set[int]], num_reads: Mapping[int, int]) -> list[int]:
    """Nodes of a graph in topological order."""
    pending_reads = dict(num_reads)
    order = [number for number, count in pending_reads.items() if not count]
    for number in order:
        for reader in readers[number]:
            pending_reads[reader] -= 1
            if not pending_reads[reader]:
                order.append(reader)
    return order


_CLOSURE_OPS = ("relax.invoke_closure", "relax.invoke_pure_closure", "relax.make_closure")

OPAQUE_CALLS = (
    *_CLOSURE_OPS,
    "relax.call_pure_packed",
    "relax.call_dps_packed",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
)
"""Ops that call code that passes cannot read: packed functions and closures."""


@dataclass
class _Uses:
    """Devices and functions of the module that some bindings use directly, and whether they write in place."""

    devices: set[int] = field(default_factory=set)
    functions: set[tvm.ir.GlobalVar] = field(default_factory=set)
    writes_in_place: bool = False


class BindingDevices:
    """Lookup of the devices that bindings of a module use, by their indices in its manifest (list of devices).

    `mod`: placed module.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._vdevices = vdevices_of(mod)
        host = host_vdevice(self._vdevices)
        self.host = vdevice_index(host, self._vdevices) if host is not None else -1
        self._uses_by_function: dict[tvm.ir.GlobalVar, _Uses] = {}

    def is_zero_cost(self, binding: relax.Binding) -> bool:
        """Return whether a binding costs nothing: an alias, tuple, view, shape, number or check of sizes."""
        value = binding.value
        return (
            is_requirement(value)
            or not isinstance(value, (relax.Call, relax.If, relax.Function))
            or op_name(value) == RESHAPE
        )

    def device(self, value: relax.Expr) -> int:
        """Manifest index of the device of an op or a value; -1 for the host of a module without CPU devices."""
        vdevice = call_vdevice(value) if isinstance(value, relax.Call) else None
        if vdevice is None:
            vdevice = vdevice_in(value.ty)
        return vdevice_index(vdevice, self._vdevices) if vdevice is not None else self.host

    def devices(self, binding: relax.Binding) -> tuple[int, ...]:
        """The devices that a binding uses; the queue of the first one runs it.

        A function of the module uses the devices in its body. A packed function of the user uses those of its operands
        and results. A closure may use any device.
        """
        value = binding.value
        if is_transfer(binding):
            return tuple(dict.fromkeys([self.device(binding.var), *self._tensor_devices(value.args)]))
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and op_name(value) not in OPAQUE_CALLS:
            return (self.device(value),)
        devices = [*self._tensor_devices([binding.var]), *sorted(self._used_devices(binding))]
        return tuple(dict.fromkeys(devices)) or (self.host,)

    def _tensor_devices(self, values: Iterable[relax.Expr]) -> Iterator[int]:
        for value in values:
            for ty in tensor_types(value.ty):
                if ty.vdevice is not None:
                    yield vdevice_index(ty.vdevice, self._vdevices)

    def has_visible_writes(self, function: relax.Function) -> bool:
        """Return whether a function may overwrite a tensor that another binding reads.

        A write is invisible if the tensor is a parameter or a kernel's result, and the write is its only use.
        """
        bindings = list(walk_bindings(function.body, nested=False))
        results = {binding.var for binding in bindings if op_name(binding.value) == "relax.call_tir"}
        unaliased = results | {*function.params}
        values = [*(binding.value for binding in bindings), function.body.body]
        num_uses = Counter(var for value in values for var in used_vars(value))
        writers = [binding.value for binding in bindings if op_name(binding.value) in IN_PLACE]
        targets = [var for value in writers for var in overwritten(value, set())]
        if any(var not in unaliased or num_uses[var] > 1 for var in targets):
            return True
        uses = self._direct_uses(binding for binding in walk_bindings(function.body) if binding.value not in writers)
        return any(each.writes_in_place for each in self._transitive_uses(uses))

    def _used_devices(self, binding: relax.Binding) -> set[int]:
        """The devices that a binding and its transitive callees use."""
        nested = walk_bindings(relax.SeqExpr([relax.BindingBlock([binding])], relax.Tuple([])))
        return {device for uses in self._transitive_uses(self._direct_uses(nested)) for device in uses.devices}

    def _transitive_uses(self, uses: _Uses) -> Iterator[_Uses]:
        """Uses of bindings, then those of each of their transitive callees."""
        yield uses
        visited: set[tvm.ir.GlobalVar] = set()
        pending = list(uses.functions)
        while pending:
            callee = pending.pop()
            if callee not in visited:
                visited.add(callee)
                if callee not in self._uses_by_function:
                    self._uses_by_function[callee] = self._direct_uses(walk_bindings(self._mod.functions[callee].body))
                yield self._uses_by_function[callee]
                pending += self._uses_by_function[callee].functions

    def _direct_uses(self, bindings: Iterable[relax.Binding]) -> _Uses:
        uses = _Uses()
        for binding in bindings:
            value = binding.value
            uses.devices.update(self._tensor_devices([binding.var]))
            uses.writes_in_place = uses.writes_in_place or op_name(value) in IN_PLACE
            if isinstance(value, relax.Call):
                uses.devices.update(self._tensor_devices(value.args))
                callees = global_vars_in(value)
                uses.functions.update(gv for gv in callees if isinstance(self._mod.functions.get(gv), relax.Function))
                if isinstance(value.op, relax.Var) or op_name(value) in _CLOSURE_OPS:
                    uses.devices.update(range(len(self._vdevices)))
        return uses


Dependences: TypeAlias = tuple[int, int]  # bit masks of the transfers before and after a binding


@dataclass(frozen=True)
class Reads:
    """Reads among bindings."""

    direct: list[list[int]]  # indices of the bindings that each binding reads
    # The same, with bindings without cost, such as views, replaced by the bindings that they read.
    producers: list[list[int]]

    @staticmethod
    def of(bindings: Sequence[relax.Binding], is_zero_cost: Callable[[relax.Binding], bool]) -> Reads:
        """Reads of bindings in order; `is_zero_cost` tells which bindings have no cost."""
        position = {binding.var: index for index, binding in enumerate(bindings)}
        zero_cost = [is_zero_cost(binding) for binding in bindings]
        direct = [[position[var] for var in used_vars(binding.value) if var in position] for binding in bindings]
        producers: list[list[int]] = []
        for reads in direct:
            expanded = [producer for index in reads for producer in (producers[index] if zero_cost[index] else [index])]
            producers.append(list(dict.fromkeys(expanded)))
        return Reads(direct, producers)


def transfer_dependences(
    bindings: Sequence[relax.Binding],  # bindings in program order
    reads: Reads,  # reads among them
    devices: Sequence[int | None],  # device of each binding; None for bindings without cost
    isolated: Sequence[bool],  # True for transfers, and for other bindings that are parts of their own
) -> list[Dependences]:
    """For each binding the transfers that it depends on, and those that depend on it.

    Valid for bindings with a device that are not isolated. Work that reads a result of another device
    without a transfer (a shape) counts as a transfer before itself.
    """
    producers, count = reads.producers, len(bindings)
    bits = _numbered(isolated)
    entries = _numbered([_enters(index, producers, devices, isolated) for index in range(count)], sum(isolated))
    transfers = [is_transfer(binding) for binding in bindings]

    needs = list(entries)  # transfers that each binding depends on
    sourced = [0] * count  # transfers whose source is ready after it
    from_inputs = 0
    for index in range(count):
        if transfers[index] and len(producers[index]) == 1:
            sourced[producers[index][0]] |= bits[index]
        elif transfers[index] and not producers[index]:
            from_inputs |= bits[index]
    before = list(entries)
    ready_with = [0] * count
    for index in range(count):
        for producer in producers[index]:
            needs[index] |= needs[producer] | bits[producer]
            before[index] |= before[producer] | ready_with[producer]
            sourced[index] |= sourced[producer]
        if isolated[index]:
            ready_with[index] = bits[index] | from_inputs
            if transfers[index]:
                for producer in producers[index]:
                    ready_with[index] |= sourced[producer]

    covered = _covered(producers, needs, bits, transfers)
    after = [0] * count
    for index in reversed(range(count)):
        for producer in producers[index]:
            after[producer] |= after[index] | covered[index] | entries[index]
    return list(zip(before, after, strict=True))


def is_transfer(binding: relax.Binding) -> bool:
    """Return whether a binding is a transfer to another device."""
    return op_name(binding.value) in TRANSFERS


def _numbered(flags: Sequence[bool], first: int = 0) -> list[int]:
    """A distinct bit for each true flag, 0 for the others."""
    bits, number = [], first
    for flag in flags:
        bits.append(1 << number if flag else 0)
        number += flag
    return bits


def _enters(index: int, producers: list[list[int]], devices: Sequence[int | None], isolated: Sequence[bool]) -> bool:
    """Return whether work reads a result of work on another device."""
    if isolated[index] or devices[index] is None:
        return False
    return any(devices[producer] != devices[index] for producer in producers[index] if not isolated[producer])


def _covered(producers: list[list[int]], needs: list[int], bits: list[int], moves: list[bool]) -> list[int]:
    """For each isolated binding its bit, and those of the transfers whose readers all wait for it."""
    readers: dict[int, list[int]] = {index: [] for index, is_move in enumerate(moves) if is_move}
    for index, read in enumerate(producers):
        for producer in read:
            if producer in readers:
                readers[producer].append(index)
    covered = list(bits)
    owner = {bit: index for index, bit in enumerate(bits) if bit}
    for index, all_readers in readers.items():
        common = -1
        for reader in all_readers:
            common &= needs[reader]
        for bit, waited_for in owner.items():
            if common & bit:
                covered[waited_for] |= bits[index]
    return covered
