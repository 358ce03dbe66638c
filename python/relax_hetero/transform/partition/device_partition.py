"""A function's work in parts: maximal stretches on one device with the same transfers before and after them.

Transfers, and what uses several devices (control flow, calls of functions), are parts of their own. What costs nothing
belongs to the part whose result it shows, or else to nobody: whatever uses it has a copy. A part whose work takes
less time than handing it to a queue joins the only part that reads it, or that it reads, if both are on one device:
that delays others by next to nothing. `BindingDevices` says which devices a binding uses, calls followed.
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
from .transfer_dependences import Around, Reads, is_transfer, transfer_dependences
from .written_arguments import overwritten

SMALL_PART_BYTES = 64 << 10
"""Work whose tensors hold fewer bytes takes some 10 us, less than a queue needs to hand over a part."""

TYPICAL_EXTENT = 64
"""Assumed value of a symbolic size."""


@dataclass
class Part:
    """Bindings that are done together.

    Attributes
    ----------
    devices : tuple of int
        Devices that it uses, that of its queue first.
    members : list of int
        Indices of its bindings, in order.
    is_isolated : bool
        Whether it is one binding that stands apart.
    """

    devices: tuple[int, ...]
    members: list[int] = field(default_factory=list)
    is_isolated: bool = False


class DevicePartition:
    """The parts of some bindings.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        In order.
    devices : BindingDevices
        Devices of their module.

    Attributes
    ----------
    bindings : list of relax.Binding
        As given.
    parts : dict of int to Part
        Parts by number.
    part_of : dict of int to int
        From the index of a binding to the number of its part; what belongs to nobody is missing.
    """

    def __init__(self, bindings: Sequence[relax.Binding], devices: BindingDevices) -> None:
        self.parts: dict[int, Part] = {}
        self.part_of: dict[int, int] = {}
        self.bindings, self._devices = list(bindings), devices
        self._reads = Reads.of(bindings, devices.is_free)
        self._form()
        self._merge_small()

    def in_order(self) -> list[int]:
        """The parts' numbers so that each follows what it reads; of those that may be next, what most waits for."""
        sources = self._sources()
        readers, left = _reversed(sources), {number: len(read) for number, read in sources.items()}
        rank: dict[int, int] = {}
        for number in reversed(_sorted(readers, left)):
            rank[number] = max((rank[r] + self.parts[r].is_isolated for r in readers[number]), default=0)
        ready = [(-rank[number], number) for number, count in left.items() if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[1]
            order.append(number)
            for reader in readers[number]:
                left[reader] -= 1
                if not left[reader]:
                    heapq.heappush(ready, (-rank[reader], reader))
        return order

    def add(self, index: int) -> None:
        """A part of a binding that belongs to nobody."""
        self._join(self._open((self._devices.device(self.bindings[index].value),), False), index)

    def bind(self, var: relax.Var, constant: relax.Expr) -> None:
        """Another binding, in a part of its own."""
        self.bindings.append(relax.VarBinding(var, constant))
        self._reads.direct.append([])
        self._reads.makers.append([])
        self.add(len(self.bindings) - 1)

    def _form(self) -> None:
        places, bindings = self._devices, self.bindings
        devices = [() if places.is_free(binding) else places.devices(binding) for binding in bindings]
        apart = [len(used) > 1 or is_transfer(binding) for binding, used in zip(bindings, devices, strict=True)]
        works_on = [used[0] if used and not alone else None for used, alone in zip(devices, apart, strict=True)]
        around = transfer_dependences(bindings, self._reads, works_on, apart)
        opened: dict[tuple[int, Around], int] = {}
        for index, device in enumerate(works_on):
            if apart[index]:
                self._join(self._open(devices[index], True), index)
            elif device is None:
                self._follow(index)
            else:
                kind = (device, around[index])
                if kind not in opened:
                    opened[kind] = self._open((device,), False)
                self._join(opened[kind], index)

    def _open(self, devices: tuple[int, ...], is_isolated: bool) -> int:
        number = max(self.parts, default=-1) + 1
        self.parts[number] = Part(devices, is_isolated=is_isolated)
        return number

    def _join(self, number: int, index: int) -> None:
        self.parts[number].members.append(index)
        self.part_of[index] = number

    def _follow(self, index: int) -> None:
        """Have what costs nothing follow the work that it shows the result of, if it shows nothing else."""
        value = self.bindings[index].value
        reads = self._reads.direct[index]
        sources = {self.part_of.get(read) for read in reads}
        source = sources.pop() if len(sources) == 1 and len(reads) == len(used_vars(value)) else None
        if source is not None and not isinstance(value, relax.Tuple):
            if not is_transfer(self.bindings[self.parts[source].members[0]]):
                self._join(source, index)

    def _makers(self, index: int) -> set[int]:
        """Parts whose results a binding reads, through what belongs to nobody."""
        found: set[int] = set()
        for read in self._reads.direct[index]:
            found |= {read} if read in self.part_of else self._makers(read)
        return found

    def _sources(self) -> dict[int, set[int]]:
        """The parts that each part reads."""
        found: dict[int, set[int]] = {}
        for number, part in self.parts.items():
            makers = {self.part_of[maker] for index in part.members for maker in self._makers(index)}
            found[number] = makers - {number}
        return found

    def _merge_small(self) -> None:
        sources = self._sources()
        readers = _reversed(sources)
        sizes = {number: self._nbytes(part) for number, part in self.parts.items() if not part.is_isolated}
        found = True
        while found:
            found = False
            for number in [number for number, size in sizes.items() if size <= SMALL_PART_BYTES]:
                for near in (readers[number], sources[number]) if sizes[number] <= SMALL_PART_BYTES else ():
                    into = next(iter(near)) if len(near) == 1 else -1
                    if into in sizes and self.parts[into].devices == self.parts[number].devices:
                        self._merge(number, into)
                        _contract(number, into, sources, readers)
                        sizes[into] += sizes.pop(number)
                        found = True
                        break

    def _merge(self, number: int, into: int) -> None:
        part = self.parts.pop(number)
        self.parts[into].members = sorted([*self.parts[into].members, *part.members])
        self.part_of |= dict.fromkeys(part.members, into)

    def _nbytes(self, part: Part) -> int:
        """Bytes of the tensors that its work reads and makes."""
        total = 0
        for index in part.members:
            binding = self.bindings[index]
            if not self._devices.is_free(binding):
                if op_name(binding.value) in (None, *CALLS):
                    return SMALL_PART_BYTES + 1  # nobody knows
                args = binding.value.args
                total += sum(_nbytes(ty) for value in (binding.var, *args) for ty in tensor_types(value.ty))
        return total


def _contract(number: int, into: int, sources: dict[int, set[int]], readers: dict[int, set[int]]) -> None:
    """Have one node of a graph take the place of another."""
    for there, back in ((sources, readers), (readers, sources)):
        for near in there.pop(number):
            back[near].discard(number)
            if near != into:
                back[near].add(into)
                there[into].add(near)


def _reversed(sources: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The other direction of a graph."""
    found: dict[int, set[int]] = {number: set() for number in sources}
    for number, near in sources.items():
        for source in near:
            found[source].add(number)
    return found


def _nbytes(ty: relax.TensorType) -> int:
    """Bytes of a tensor; more than `SMALL` where its type does not say."""
    if not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        return SMALL_PART_BYTES + 1
    extents = [
        structural_map(extent, (tirx.Var, lambda var: tirx.IntImm(var.ty.dtype, TYPICAL_EXTENT))) for extent in ty.shape
    ]
    return tensor_bytes([int(tvm.sym.Analyzer().simplify(extent)) for extent in extents], ty.dtype.dtype)


def _sorted(readers: Mapping[int, set[int]], missing: Mapping[int, int]) -> list[int]:
    """Parts so that each follows what it reads."""
    left = dict(missing)
    order = [number for number, count in left.items() if not count]
    for number in order:
        for reader in readers[number]:
            left[reader] -= 1
            if not left[reader]:
                order.append(reader)
    return order


_ANYWHERE = ("relax.invoke_closure", "relax.invoke_pure_closure", "relax.make_closure")

CALLS = (
    *_ANYWHERE,
    "relax.call_pure_packed",
    "relax.call_dps_packed",
    "relax.call_inplace_packed",
    "relax.call_builtin_with_ctx",
    "relax.call_py_func",
)
"""Ops that run what is not seen in the op itself."""


@dataclass
class _Uses:
    """Devices and functions of the module that code uses itself, and whether it writes in place."""

    devices: set[int] = field(default_factory=set)
    functions: set[tvm.ir.GlobalVar] = field(default_factory=set)
    writes: bool = False


class BindingDevices:
    """The devices that bindings of a module use.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._vdevices = vdevices_of(mod)
        host = host_vdevice(self._vdevices)
        self.host = vdevice_index(host, self._vdevices) if host is not None else -1
        self._of_functions: dict[tvm.ir.GlobalVar, _Uses] = {}

    def is_free(self, binding: relax.Binding) -> bool:
        """True if a binding costs nothing: it names, groups or views others, is a shape or a number, or requires."""
        value = binding.value
        return (
            is_requirement(value)
            or not isinstance(value, (relax.Call, relax.If, relax.Function))
            or op_name(value) == RESHAPE
        )

    def device(self, value: relax.Expr) -> int:
        """The device that an op works on, or that a value is on: manifest index, -1 for the implicit host."""
        vdevice = call_vdevice(value) if isinstance(value, relax.Call) else None
        if vdevice is None:
            vdevice = next((t.vdevice for t in tensor_types(value.ty) if t.vdevice is not None), None)
        return vdevice_index(vdevice, self._vdevices) if vdevice is not None else self.host

    def devices(self, binding: relax.Binding) -> tuple[int, ...]:
        """The devices that a binding uses, the one whose queue runs it first.

        Functions of the module use what is written in them, the user's own packed functions the devices of the tensors
        that they take and give, and closures may use any.
        """
        value = binding.value
        if is_transfer(binding):
            return tuple(dict.fromkeys([vdevice_index(value.attrs.dst_vdevice, self._vdevices), *self._in(value.args)]))
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and op_name(value) not in CALLS:
            return (self.device(value),)
        found = [*self._in([binding.var]), *sorted(self._used_by(binding))]
        return tuple(dict.fromkeys(found)) or (self.host,)

    def _in(self, values: Iterable[relax.Expr]) -> Iterator[int]:
        for value in values:
            for ty in tensor_types(value.ty):
                if ty.vdevice is not None:
                    yield vdevice_index(ty.vdevice, self._vdevices)

    def writes_what_others_see(self, function: relax.Function) -> bool:
        """Return whether a function may overwrite a tensor that something else of it reads.

        It does not where the tensor is a parameter, which is the call's own then, or comes out of a kernel, and nothing
        but the work that overwrites it uses it.
        """
        own = list(walk_bindings(function.body, nested=False))
        made = {binding.var for binding in own if op_name(binding.value) == "relax.call_tir"} | {*function.params}
        uses = Counter(var for value in (*(b.value for b in own), function.body.body) for var in used_vars(value))
        writers = [binding.value for binding in own if op_name(binding.value) in IN_PLACE]
        if any(var not in made or uses[var] > 1 for value in writers for var in overwritten(value, set())):
            return True
        own_uses = self._uses(binding for binding in walk_bindings(function.body) if binding.value not in writers)
        return any(uses.writes for uses in self._reached(own_uses))

    def _used_by(self, binding: relax.Binding) -> set[int]:
        """The devices that a binding and all that it calls use."""
        inside = walk_bindings(relax.SeqExpr([relax.BindingBlock([binding])], relax.Tuple([])))
        return {device for uses in self._reached(self._uses(inside)) for device in uses.devices}

    def _reached(self, own: _Uses) -> Iterator[_Uses]:
        """Uses of code and of each function that it calls."""
        yield own
        seen: set[tvm.ir.GlobalVar] = set()
        pending = list(own.functions)
        while pending:
            callee = pending.pop()
            if callee not in seen:
                seen.add(callee)
                if callee not in self._of_functions:
                    self._of_functions[callee] = self._uses(walk_bindings(self._mod.functions[callee].body))
                yield self._of_functions[callee]
                pending += self._of_functions[callee].functions

    def _uses(self, bindings: Iterable[relax.Binding]) -> _Uses:
        found = _Uses()
        for binding in bindings:
            value = binding.value
            found.devices.update(self._in([binding.var]))
            found.writes = found.writes or op_name(value) in IN_PLACE
            if isinstance(value, relax.Call):
                found.devices.update(self._in(value.args))
                callees = global_vars_in(value)
                found.functions.update(gv for gv in callees if isinstance(self._mod.functions.get(gv), relax.Function))
                if isinstance(value.op, relax.Var) or op_name(value) in _ANYWHERE:
                    found.devices.update(range(len(self._vdevices)))
        return found
