"""Exchanges between the devices of a mesh, which give values other shardings, or other meshes.

======== ======== ================================
from     to       exchange
======== ======== ================================
``P``    ``R``    all-reduce
``P``    ``S[a]`` reduce-scatter
``S[a]`` ``R``    all-gather
``S[a]`` ``S[b]`` all-to-all
``R``    ``S[a]`` a slice, without an exchange
======== ======== ================================

On a mesh of several axes, each exchange is along one axis, between the devices that differ in that coordinate only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm
from tvm import relax

from ...target.mesh import Mesh
from ...tir.cuda.all_reduce import AllReduce, supports
from ..ir.blocks import shape_of, used_vars
from ..ir.rewriting import calls_pure_op
from .gpu_sums import GpuSums, Sum
from .local_bindings import LocalBindings, Make, numbered, on_device
from .sharding import REPLICATED, Sharding, Shardings, known


@dataclass(frozen=True)
class MeshValue:
    """A value over a mesh."""

    mesh: Mesh
    shardings: list[Shardings]  # shardings of each tensor in it
    locals: list[relax.Expr]  # the value of each device


class Exchanges:
    """Values of a function over meshes, and the exchanges between their devices."""

    def __init__(self, bindings: LocalBindings) -> None:
        self.values: dict[relax.Var, MeshValue] = {}
        # A value that follows from one other value, and the maker of it, so that the whole can be made again on a
        # device instead of gathered.
        self.repeatable: dict[relax.Var, tuple[relax.Expr, Make]] = {}
        self._bindings = bindings
        self._converted: dict[tuple[relax.Expr, Mesh, Shardings], list[relax.Expr]] = {}

    def get(self, var: relax.Var, mesh: Mesh, shardings: Shardings) -> list[relax.Expr]:
        """The local value of each device of a mesh."""
        key = var, mesh, shardings
        if key not in self._converted:
            value = self.values[var]
            if value.mesh != mesh:
                value = self._moved(var, value, mesh)
            self._converted[key] = self._changed(var, value, shardings).locals
        return self._converted[key]

    def has(self, var: relax.Expr, mesh: Mesh, shardings: Shardings) -> bool:
        """Return whether a value with another sharding has been made."""
        return (var, mesh, shardings) in self._converted

    # -- other meshes

    def _moved(self, var: relax.Var, value: MeshValue, mesh: Mesh) -> MeshValue:
        """The value on another mesh, with any sharding."""
        own = _shardings(value)
        if _is_whole(own):
            return MeshValue(mesh, [whole_on(mesh)], [self._local_on(value, device) for device in mesh])
        if len(mesh) == 1:
            return MeshValue(mesh, [whole_on(mesh)], [self._collected(var, value, mesh.positions[0])])
        if value.mesh.shape == mesh.shape and not any(each.is_partial for each in own):
            pairs = zip(value.locals, mesh, strict=True)
            return MeshValue(mesh, [own], [self._bindings.transfer(local, device) for local, device in pairs])
        whole = MeshValue(value.mesh, [whole_on(value.mesh)], self.get(var, value.mesh, whole_on(value.mesh)))
        return MeshValue(mesh, [whole_on(mesh)], [self._local_on(whole, device) for device in mesh])

    def _local_on(self, value: MeshValue, device: int) -> relax.Expr:
        """A whole value on a device."""
        if device in value.mesh.positions:
            return value.locals[value.mesh.positions.index(device)]
        return self._bindings.transfer(value.locals[0], device)

    def _collected(self, var: relax.Var, value: MeshValue, device: int) -> relax.Expr:
        """All elements on one device: along the last axis of the mesh first, whose parts are within those of others."""
        own, mesh, locals_ = _shardings(value), value.mesh, value.locals
        at = mesh.positions.index(device) if device in mesh.positions else 0
        home, name = mesh.coordinates(at), str(var.name)
        for axis in reversed(range(len(mesh.shape))):
            collected, positions = [], []
            for numbers in mesh.groups(axis):
                group, parts = [mesh.positions[i] for i in numbers], [locals_[i] for i in numbers]
                target = device if axis == 0 else group[home[axis]]
                if own[axis].is_partial:
                    sent = [self._bindings.transfer(part, target) for part in parts]
                    collected.append(self._bindings.added(sent, target, name))
                elif own[axis].is_split:
                    collected.append(self._gathered(var, value, parts, target, own[axis], f"{name}_whole"))
                else:
                    local = parts[home[axis]]
                    collected.append(self._bindings.transfer(local, device) if axis == 0 else local)
                positions.append(group[home[axis]])
            mesh, locals_ = Mesh(tuple(positions), mesh.shape[:axis]), collected
        return locals_[0]

    # -- other shardings

    def _changed(self, var: relax.Var, value: MeshValue, shardings: Shardings) -> MeshValue:
        """The value with other shardings on its mesh.

        A split along a later axis of the mesh, within one that changes, is undone before, and made again after it.
        """
        own, axes = list(_shardings(value)), range(len(value.mesh.shape))
        for axis in reversed(axes):
            earlier = [other for other in axes[:axis] if own[other] != shardings[other]]
            if own[axis].is_split and any(own[axis].axis in (own[k].axis, shardings[k].axis) for k in earlier):
                value, own[axis] = self._step(var, value, axis, REPLICATED), REPLICATED
        pending = [axis for axis in axes if own[axis] != shardings[axis]]
        while pending:
            axis = next((each for each in pending if self._shrinks(own, shardings, each, pending)), pending[0])
            pending.remove(axis)
            value, own[axis] = self._step(var, value, axis, shardings[axis]), shardings[axis]
        return value

    @staticmethod
    def _shrinks(own: Sequence[Sharding], shardings: Shardings, axis: int, pending: Sequence[int]) -> bool:
        """Return whether a change leaves less to exchange, and need not follow that of an earlier axis."""
        split = shardings[axis].axis
        earlier = [other for other in pending if other < axis]
        is_free = all(split not in (own[other].axis, shardings[other].axis) for other in earlier)
        return is_free and split is not None and not own[axis].is_split

    def _step(self, var: relax.Var, value: MeshValue, axis: int, sharding: Sharding) -> MeshValue:
        """The value with another sharding along one axis of its mesh."""
        own, mesh = _shardings(value), value.mesh
        after = (*own[:axis], sharding, *own[axis + 1 :])
        key = var, mesh, after
        if key not in self._converted:
            locals_: list[relax.Expr | None] = [None] * len(mesh)
            for numbers in mesh.groups(axis):
                parts = [value.locals[number] for number in numbers]
                names = [numbered("", number) for number in numbers]
                group = _Group(tuple(mesh.positions[number] for number in numbers), str(var.name), names, parts)
                for number, local in zip(numbers, self._exchanged(var, value, group, own[axis], sharding), strict=True):
                    locals_[number] = local
            self._converted[key] = locals_  # type: ignore[assignment]
        return MeshValue(mesh, [after], self._converted[key])

    def _exchanged(
        self, var: relax.Var, value: MeshValue, group: _Group, own: Sharding, sharding: Sharding
    ) -> list[relax.Expr]:
        """Local values of the devices of a group after an exchange within it."""
        if len(group.devices) == 1:
            return list(group.parts)
        if own.is_partial:
            return self._scattered(group, sharding) if sharding.is_split else self._reduced(group)
        if own == REPLICATED:
            return [self._sliced(group, rank, local, sharding) for rank, local in enumerate(group.parts)]
        if sharding.axis != own.axis and sharding.is_split and not own.segments and not sharding.segments:
            return self._all_to_all(group, own, sharding)
        if not sharding.is_split and self._sums_gather(group):
            if self._source_of_repeat(var, value, group.devices[0]) is None:
                return self._reduced(replace(group, parts=self._padded(group, own)))
        whole = [
            self._gathered(var, value, group.parts, device, own, f"{group.name}_whole{suffix}")
            for device, suffix in zip(group.devices, group.suffixes, strict=True)
        ]
        if not sharding.is_split:
            return whole
        return [self._sliced(group, rank, local, sharding) for rank, local in enumerate(whole)]

    def _reduced(self, group: _Group) -> list[relax.Expr]:
        """An all-reduce."""
        results = [
            self._bindings.new_var(f"{group.name}_sum{suffix}", on_device(local.ty, None), device)
            for device, local, suffix in zip(group.devices, group.parts, group.suffixes, strict=True)
        ]
        self._bindings.items.append(Sum(results, list(group.parts), group.devices))
        return list(results)

    def _scattered(self, group: _Group, sharding: Sharding) -> list[relax.Expr]:
        """A reduce-scatter."""
        names = [f"{group.name}_scattered{suffix}" for suffix in group.suffixes]
        received = zip(self._shares(group, sharding), group.devices, names, strict=True)
        return [self._bindings.added(shares, device, name) for shares, device, name in received]

    def _all_to_all(self, group: _Group, own: Sharding, sharding: Sharding) -> list[relax.Expr]:
        """Each device sends each other one its share of another axis."""
        names = [f"{group.name}_exchanged{suffix}" for suffix in group.suffixes]
        joined: Make = lambda args: relax.op.concat(list(args), own.axis)  # noqa: E731
        received = zip(self._shares(group, sharding), group.devices, names, strict=True)
        return [self._bindings.emit(joined, shares, device, name) for shares, device, name in received]

    def _shares(self, group: _Group, sharding: Sharding) -> list[list[relax.Expr]]:
        """Shares of each device of a group, on it, of what each device has.

        All devices cut before any sends, so that the transfers can become one exchange (`ExchangeByNccl`).
        """
        ranks = range(len(group.devices))
        cut = [[self._sliced(group, rank, group.parts[source], sharding, source) for source in ranks] for rank in ranks]
        return [
            [self._bindings.transfer(share, device) for share in shares]
            for shares, device in zip(cut, group.devices, strict=True)
        ]

    def _sums_gather(self, group: _Group) -> bool:
        """Return whether GPUs gather a small value as a sum of what they have, padded with zeros: by one kernel each.

        That is exact, as all summands but one are zeros; only -0 becomes 0.
        """
        shape = [known(extent) for extent in shape_of(group.parts[0]) or [None]]
        if None in shape or not all(map(self._bindings.records_graphs, group.devices)):
            return False
        count = math.prod(extent or 0 for extent in shape) * len(group.devices)
        return supports(count, str(group.parts[0].ty.dtype)) and AllReduce((count,), len(group.devices)).is_short

    def _padded(self, group: _Group, own: Sharding) -> list[relax.Expr]:
        """The parts of a split value, each among zeros in the place of the others."""
        axis, count, name = own.axis, len(group.devices), f"{group.name}_among_zeros"
        assert axis is not None, "the value is split"
        extents = [int(extent) for extent in shape_of(group.parts[0]) or []]
        sizes = [size // count for size in own.segments or (extents[axis] * count,)]
        padded: list[relax.Expr] = []
        for rank, (device, local) in enumerate(zip(group.devices, group.parts, strict=True)):
            pieces, begin = [], 0
            for size in sizes:
                is_whole = len(sizes) == 1
                piece = local if is_whole else self._slice_of(local, axis, begin, begin + size, device, group.name)
                widths = [0] * (2 * len(extents))
                widths[2 * axis], widths[2 * axis + 1] = rank * size, (count - 1 - rank) * size
                pieces.append(self._bindings.emit(partial(_zeros_around, widths), [piece], device, name))
                begin += size
            joined: Make = lambda args: relax.op.concat(list(args), axis)  # noqa: E731
            padded.append(pieces[0] if len(pieces) == 1 else self._bindings.emit(joined, pieces, device, name))
        return padded

    def _source_of_repeat(self, var: relax.Var, value: MeshValue, device: int) -> relax.Expr | None:
        """A whole value of a device from which it can compute a variable; None if there is none."""
        if var not in self.repeatable or len(value.mesh.shape) > 1:
            return None
        source, _ = self.repeatable[var]
        for mesh in (Mesh.of_device(device), value.mesh):
            whole = self._converted.get((source, mesh, whole_on(mesh)))
            if whole and device in mesh.positions:
                return whole[mesh.positions.index(device)]
        return None

    def _gathered(
        self, var: relax.Var, value: MeshValue, parts: Sequence[relax.Expr], device: int, own: Sharding, name: str
    ) -> relax.Expr:
        """All elements of a split value on a device: made again of what is there, or exchanged."""
        source = self._source_of_repeat(var, value, device)
        if source is not None:
            return self._bindings.emit(self.repeatable[var][1], [source], device, name)
        sent = [self._bindings.transfer(part, device) for part in parts]
        axis = own.axis
        assert axis is not None, "the value is split"
        pieces: list[relax.Expr] = []
        begin = 0
        for size in own.segments or (0,):
            share = size // len(parts)
            for part in sent:
                pieces.append(self._slice_of(part, axis, begin, begin + share, device, name) if share else part)
            begin += share
        return self._bindings.emit(lambda args: relax.op.concat(list(args), axis), pieces, device, name)

    def _sliced(
        self, group: _Group, rank: int, local: relax.Expr, sharding: Sharding, source: int | None = None
    ) -> relax.Expr:
        """The part of a device of a group, of a value that it has whole, or that device `source` has."""
        axis, device = sharding.axis, group.devices[rank if source is None else source]
        assert axis is not None, "the value becomes split"
        ranges = sharding.ranges(int((shape_of(local) or [])[axis]), rank, len(group.devices))
        pieces = [self._slice_of(local, axis, *pair, device, group.name) for pair in ranges]
        if len(pieces) == 1:
            return pieces[0]
        return self._bindings.emit(lambda args: relax.op.concat(list(args), axis), pieces, device, f"{group.name}_part")

    def _slice_of(self, local: relax.Expr, axis: int, begin: int, end: int, device: int, name: str) -> relax.Expr:
        make: Make = lambda args: relax.op.strided_slice(args[0], [axis], [begin], [end])  # noqa: E731
        return self._bindings.emit(make, [local], device, f"{name}_part")

    # -- the end

    def lowered(self, results: set[relax.Var]) -> list[relax.Binding]:
        """All bindings that results need, with exchanges in place of sums."""
        bindings = self._bindings
        used, needed = set(results), []
        for item in reversed(bindings.items):
            if isinstance(item, Sum):
                if any(result in used for result in item.results):
                    used.update(var for part in item.parts for var in used_vars(part))
                    needed.append(item)
            elif item.var in used or not _is_droppable(item):
                used.update(used_vars(item.value))
                needed.append(item)
        order = needed[::-1]
        by_kernels = [item for item in order if isinstance(item, Sum) and self._has_kernel(item, used)]
        bindings.restart()
        sums = GpuSums(bindings, order, by_kernels, results, self._copies(used))
        for item in order:
            if not isinstance(item, Sum):
                sums.keep(item)
            elif item in by_kernels:
                sums.add(item)
            else:
                self._add_on_each(item, used)
        return bindings.items  # type: ignore[return-value]

    def _copies(self, used: set[relax.Var]) -> dict[relax.Var, dict[int, relax.Expr]]:
        """Values that all devices of a mesh have and use, on each of them."""
        copies: dict[relax.Var, dict[int, relax.Expr]] = {}
        for (_, mesh, shardings), locals_ in self._converted.items():
            if len(mesh) > 1 and _is_whole(shardings) and used.issuperset(locals_):
                copies.update((local, dict(zip(mesh, locals_, strict=True))) for local in locals_)
        return copies

    def _add_on_each(self, item: Sum, used: set[relax.Var]) -> None:
        """Add the parts of a sum on each device that uses it, in the same order on all."""
        bindings = self._bindings
        for device, result in zip(item.group, item.results, strict=True):
            if result in used:
                parts = [bindings.transfer(part, device) for part in item.parts]
                total = bindings.added(parts, device, str(result.name))
                last = bindings.items.pop()
                assert isinstance(last, relax.VarBinding) and last.var.same_as(total), "a sum is the last binding"
                bindings.items.append(relax.VarBinding(result, last.value))

    def _has_kernel(self, item: Sum, used: set[relax.Var]) -> bool:
        """Return whether GPUs sum by kernels that write to each other's memory: all of them must use the result."""
        shape = [known(extent) for extent in shape_of(item.results[0]) or [None]]
        if None in shape or not all(result in used for result in item.results):
            return False
        count = math.prod(extent or 0 for extent in shape)
        return all(map(self._bindings.records_graphs, item.group)) and supports(count, str(item.results[0].ty.dtype))


@dataclass(frozen=True)
class _Group:
    """Devices that exchange parts of a value."""

    devices: tuple[int, ...]  # positions in the module's list
    name: str  # name of the value
    suffixes: list[str]  # suffix of names on each device
    parts: list[relax.Expr]  # local value of each device


def whole_on(mesh: Mesh) -> Shardings:
    """Shardings of a value that every device of a mesh has."""
    return (REPLICATED,) * len(mesh.shape)


def _zeros_around(widths: Sequence[int], args: Sequence[relax.Expr]) -> relax.Expr:
    return relax.op.nn.pad(args[0], list(widths))


def _shardings(value: MeshValue) -> Shardings:
    return value.shardings[0] if value.shardings else whole_on(value.mesh)


def _is_whole(shardings: Shardings) -> bool:
    return all(sharding == REPLICATED for sharding in shardings)


def _is_droppable(binding: relax.Binding) -> bool:
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return False
    return not isinstance(value, relax.Call) or tvm.ir.is_prim_expr(value) or calls_pure_op(value)
