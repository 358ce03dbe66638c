"""A function's work in parts: maximal sets of bindings on one device with the same transfers before and after them.

Transfers, and bindings that use several devices (control flow, calls of functions), are parts of their own. A binding
without cost, such as a view, belongs to the part whose result it views, or else to no part: its users get copies. A
part whose work takes less time than its submission to a queue joins its only reader, or the only part that it reads, if
both are on one device: the delay of others is negligible. `BindingDevices` tells the devices that a binding uses,
including those of its callees.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ...op.require import is_requirement
from ...target.vdevice import host_vdevice, vdevice_index, vdevices_of
from ..ir.blocks import used_vars
from ..ir.kernels import call_vdevice, tensor_bytes
from ..ir.op_names import IN_PLACE, RESHAPE
from ..ir.rewriting import global_vars_in, op_name, tensor_types, walk_bindings
from .transfer_dependences import Dependences, Reads, is_transfer, transfer_dependences
from .written_arguments import overwritten

SMALL_PART_BYTES = 64 << 10
"""Bytes of tensors up to which work takes some 10 us, less than the submission of a part to a queue."""

TYPICAL_EXTENT = 64
"""Value that is assumed for a symbolic size."""


@dataclass
class Part:
    """Bindings that run together.

    Attributes
    ----------
    devices : tuple of int
        Devices that it uses, that of its queue first.
    members : list of int
        Indices of its bindings, in order.
    is_isolated : bool
        True for a single binding that cannot be merged: a transfer, or one that uses several devices.
    """

    devices: tuple[int, ...]
    members: list[int] = field(default_factory=list)
    is_isolated: bool = False


class DevicePartition:
    """The parts of a sequence of bindings.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        Bindings in program order.
    devices : BindingDevices
        Devices of their module.

    Attributes
    ----------
    bindings : list of relax.Binding
        The bindings, and constants that `bind` added.
    parts : dict of int to Part
        Parts by number.
    part_of : dict of int to int
        From the index of a binding to the number of its part; bindings without a part are missing.
    """

    def __init__(self, bindings: Sequence[relax.Binding], devices: BindingDevices) -> None:
        self.parts: dict[int, Part] = {}
        self.part_of: dict[int, int] = {}
        self.bindings, self._devices = list(bindings), devices
        self._reads = Reads.of(bindings, devices.is_free)
        self._form()
        self._merge_small()

    def in_order(self) -> list[int]:
        """The parts' numbers in topological order; of ready parts the one with the longest chain of readers first."""
        sources = self._sources()
        readers, pending_reads = _reversed(sources), {number: len(read) for number, read in sources.items()}
        rank: dict[int, int] = {}
        for number in reversed(_sorted(readers, pending_reads)):
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

    def add(self, index: int) -> None:
        """Add a part for a binding without one."""
        self._join(self._open((self._devices.device(self.bindings[index].value),), False), index)

    def bind(self, var: relax.Var, constant: relax.Expr) -> None:
        """Add a binding of a constant, in a part of its own."""
        self.bindings.append(relax.VarBinding(var, constant))
        self._reads.direct.append([])
        self._reads.makers.append([])
        self.add(len(self.bindings) - 1)

    def _form(self) -> None:
        bindings = self.bindings
        used = [() if self._devices.is_free(binding) else self._devices.devices(binding) for binding in bindings]
        isolated = [len(devices) > 1 or is_transfer(binding) for binding, devices in zip(bindings, used, strict=True)]
        works_on = [d[0] if d and not is_isolated else None for d, is_isolated in zip(used, isolated, strict=True)]
        dependences = transfer_dependences(bindings, self._reads, works_on, isolated)
        numbers: dict[tuple[int, Dependences], int] = {}
        for index, device in enumerate(works_on):
            if isolated[index]:
                self._join(self._open(used[index], True), index)
            elif device is None:
                self._follow(index)
            else:
                key = (device, dependences[index])
                if key not in numbers:
                    numbers[key] = self._open((device,), False)
                self._join(numbers[key], index)

    def _open(self, devices: tuple[int, ...], is_isolated: bool) -> int:
        number = max(self.parts, default=-1) + 1
        self.parts[number] = Part(devices, is_isolated=is_isolated)
        return number

    def _join(self, number: int, index: int) -> None:
        self.parts[number].members.append(index)
        self.part_of[index] = number

    def _follow(self, index: int) -> None:
        """Add a binding without cost to the part whose result it views, if it reads nothing else."""
        value = self.bindings[index].value
        reads = self._reads.direct[index]
        sources = {self.part_of.get(read) for read in reads}
        source = sources.pop() if len(sources) == 1 and len(reads) == len(used_vars(value)) else None
        if source is not None and not isinstance(value, relax.Tuple):
            if not is_transfer(self.bindings[self.parts[source].members[0]]):
                self._join(source, index)

    def _makers(self, index: int) -> set[int]:
        """The bindings with a part that a binding reads, directly or through bindings without a part."""
        makers: set[int] = set()
        for read in self._reads.direct[index]:
            makers |= {read} if read in self.part_of else self._makers(read)
        return makers

    def _sources(self) -> dict[int, set[int]]:
        """The parts that each part reads."""
        sources: dict[int, set[int]] = {}
        for number, part in self.parts.items():
            makers = {self.part_of[maker] for index in part.members for maker in self._makers(index)}
            sources[number] = makers - {number}
        return sources

    def _merge_small(self) -> None:
        sources = self._sources()
        readers = _reversed(sources)
        sizes = {number: self._nbytes(part) for number, part in self.parts.items() if not part.is_isolated}
        has_merged = True
        while has_merged:
            has_merged = False
            for number in [number for number, size in sizes.items() if size <= SMALL_PART_BYTES]:
                for neighbours in (readers[number], sources[number]) if sizes[number] <= SMALL_PART_BYTES else ():
                    into = next(iter(neighbours)) if len(neighbours) == 1 else -1
                    if into in sizes and self.parts[into].devices == self.parts[number].devices:
                        self._merge(number, into)
                        _contract(number, into, sources, readers)
                        sizes[into] += sizes.pop(number)
                        has_merged = True
                        break

    def _merge(self, number: int, into: int) -> None:
        part = self.parts.pop(number)
        self.parts[into].members = sorted([*self.parts[into].members, *part.members])
        self.part_of |= dict.fromkeys(part.members, into)

    def _nbytes(self, part: Part) -> int:
        """Bytes of the tensors that a part reads and defines."""
        total = 0
        for index in part.members:
            binding = self.bindings[index]
            if not self._devices.is_free(binding):
                if op_name(binding.value) in (None, *CALLS):
                    return SMALL_PART_BYTES + 1  # unknown
                args = binding.value.args
                total += sum(_nbytes(ty) for value in (binding.var, *args) for ty in tensor_types(value.ty))
        return total


def _contract(number: int, into: int, sources: dict[int, set[int]], readers: dict[int, set[int]]) -> None:
    """Merge the node `number` of a graph into the node `into`."""
    for edges, reversed_edges in ((sources, readers), (readers, sources)):
        for neighbour in edges.pop(number):
            reversed_edges[neighbour].discard(number)
            if neighbour != into:
                reversed_edges[neighbour].add(into)
                edges[into].add(neighbour)


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
    extents = [
        structural_map(extent, (tirx.Var, lambda var: tirx.IntImm(var.ty.dtype, TYPICAL_EXTENT))) for extent in ty.shape
    ]
    return tensor_bytes([int(tvm.sym.Analyzer().simplify(extent)) for extent in extents], ty.dtype.dtype)


def _sorted(readers: Mapping[int, set[int]], num_reads: Mapping[int, int]) -> list[int]:
    """Parts in topological order."""
    pending_reads = dict(num_reads)
    order = [number for number, count in pending_reads.items() if not count]
    for number in order:
        for reader in readers[number]:
            pending_reads[reader] -= 1
            if not pending_reads[reader]:
                order.append(reader)
    return order


_CLOSURE_OPS = ("relax.invoke_closure", "relax.invoke_pure_closure", "relax.make_closure")

CALLS = (
    *_CLOSURE_OPS,
    "relax.call_pure_packed",
    "relax.call_dps_packed",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
)
"""Ops that call code outside of the IR, or closures."""


@dataclass
class _Uses:
    """Devices and functions of the module that code uses directly, and whether it writes in place."""

    devices: set[int] = field(default_factory=set)
    functions: set[tvm.ir.GlobalVar] = field(default_factory=set)
    writes: bool = False


class BindingDevices:
    """The devices that bindings of a module use.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed module.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._vdevices = vdevices_of(mod)
        host = host_vdevice(self._vdevices)
        self.host = vdevice_index(host, self._vdevices) if host is not None else -1
        self._uses_by_function: dict[tvm.ir.GlobalVar, _Uses] = {}

    def is_free(self, binding: relax.Binding) -> bool:
        """Return whether a binding costs nothing: an alias, tuple, view, shape, number or requirement."""
        value = binding.value
        return (
            is_requirement(value)
            or not isinstance(value, (relax.Call, relax.If, relax.Function))
            or op_name(value) == RESHAPE
        )

    def device(self, value: relax.Expr) -> int:
        """Manifest index of the device of an op or a value; -1 for the implicit host."""
        vdevice = call_vdevice(value) if isinstance(value, relax.Call) else None
        if vdevice is None:
            vdevice = next((t.vdevice for t in tensor_types(value.ty) if t.vdevice is not None), None)
        return vdevice_index(vdevice, self._vdevices) if vdevice is not None else self.host

    def devices(self, binding: relax.Binding) -> tuple[int, ...]:
        """The devices that a binding uses, the first of which is that of its queue.

        Functions of the module use the devices in their bodies, the user's own packed functions those of their operands
        and results, and closures may use any.
        """
        value = binding.value
        if is_transfer(binding):
            return tuple(
                dict.fromkeys([vdevice_index(value.attrs.dst_vdevice, self._vdevices), *self._devices_of(value.args)])
            )
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and op_name(value) not in CALLS:
            return (self.device(value),)
        devices = [*self._devices_of([binding.var]), *sorted(self._used_by(binding))]
        return tuple(dict.fromkeys(devices)) or (self.host,)

    def _devices_of(self, values: Iterable[relax.Expr]) -> Iterator[int]:
        for value in values:
            for ty in tensor_types(value.ty):
                if ty.vdevice is not None:
                    yield vdevice_index(ty.vdevice, self._vdevices)

    def has_visible_writes(self, function: relax.Function) -> bool:
        """Return whether a function may overwrite a tensor that another binding reads.

        A write is invisible if the tensor is a parameter or a kernel's result, and the write is its only use.
        """
        bindings = list(walk_bindings(function.body, nested=False))
        owned = {binding.var for binding in bindings if op_name(binding.value) == "relax.call_tir"} | {*function.params}
        uses = Counter(var for value in (*(b.value for b in bindings), function.body.body) for var in used_vars(value))
        writers = [binding.value for binding in bindings if op_name(binding.value) in IN_PLACE]
        if any(var not in owned or uses[var] > 1 for value in writers for var in overwritten(value, set())):
            return True
        own_uses = self._uses(binding for binding in walk_bindings(function.body) if binding.value not in writers)
        return any(uses.writes for uses in self._transitive_uses(own_uses))

    def _used_by(self, binding: relax.Binding) -> set[int]:
        """The devices that a binding and its transitive callees use."""
        inside = walk_bindings(relax.SeqExpr([relax.BindingBlock([binding])], relax.Tuple([])))
        return {device for uses in self._transitive_uses(self._uses(inside)) for device in uses.devices}

    def _transitive_uses(self, own: _Uses) -> Iterator[_Uses]:
        """Uses of code and of each of its transitive callees."""
        yield own
        visited: set[tvm.ir.GlobalVar] = set()
        pending = list(own.functions)
        while pending:
            callee = pending.pop()
            if callee not in visited:
                visited.add(callee)
                if callee not in self._uses_by_function:
                    self._uses_by_function[callee] = self._uses(walk_bindings(self._mod.functions[callee].body))
                yield self._uses_by_function[callee]
                pending += self._uses_by_function[callee].functions

    def _uses(self, bindings: Iterable[relax.Binding]) -> _Uses:
        uses = _Uses()
        for binding in bindings:
            value = binding.value
            uses.devices.update(self._devices_of([binding.var]))
            uses.writes = uses.writes or op_name(value) in IN_PLACE
            if isinstance(value, relax.Call):
                uses.devices.update(self._devices_of(value.args))
                callees = global_vars_in(value)
                uses.functions.update(gv for gv in callees if isinstance(self._mod.functions.get(gv), relax.Function))
                if isinstance(value.op, relax.Var) or op_name(value) in _CLOSURE_OPS:
                    uses.devices.update(range(len(self._vdevices)))
        return uses
