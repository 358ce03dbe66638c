"""PlanMemoryPerDevice: tensors of a function that are never there at one time share storage, within a device.

Before::

    alloc = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
    cls.kernel(x, alloc)
    alloc1 = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")

After::

    storage = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
    alloc = R.memory.alloc_tensor(storage, 0, R.shape([4]), "float32", 0)
    cls.kernel(x, alloc)
    storage1 = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
    alloc1 = R.memory.alloc_tensor(storage1, 0, R.shape([4]), "float32", 1)

TVM's planner shares storage between devices, and between branches of an `If`; it frees what a packed function read
right after the call, although a user's function may return its operand, and it plans nothing that a transfer reads.
Here each device and each branch plans for itself, and what leaves the function, or goes to another one that may keep
or return it, is left to the machine's pool. A transfer may return its operand or the room it was given: both stay.

Sizes that are symbolic are planned by their upper bounds where the function has some (`tir_var_upper_bound`), else with
others of the same symbols.

`plan_storages` chooses which tensors share: of two greedy orders, the one that takes fewer bytes.

Assumes no dataflow blocks and purity checks removed. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...artifact.metadata import CPU
from ...target.backend import backend_of
from ...target.vdevice import vdevices_of
from ...tir.core.builder import plain_extent
from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.kernels import bytes_of_extents
from ..ir.rewriting import copy_module, map_bindings, op_name, relax_functions
from ..ir.tensor_aliases import NOTHING, Roots, TensorAliases, flattened, is_view, merged
from ..record.plan_arena import Lifetime, groups_by_unit, meetings_of
from .lower_transfers import is_lowered_transfer

# How much memory an allocation takes.

ALLOC = "relax.builtin.alloc_tensor"
"""The op that allocates a tensor, before memory is planned."""

UPPER_BOUND = "tir_var_upper_bound"
"""On a Relax function, as stock TVM reads it: the most that symbolic dimensions of these names will be."""


def upper_bounds(func: relax.Function) -> dict[str, int]:
    """The most that symbolic dimensions of a function will be, of those that say so."""
    return {str(name): int(bound) for name, bound in (func.attrs.get(UPPER_BOUND) or {}).items()}


def size_of(alloc: relax.Call, bounds: Mapping[str, int]) -> Any:
    """The bytes that an allocation takes: the most, where its symbols have upper bounds; else symbolic."""
    nbytes = bytes_of_extents(map(plain_extent, alloc.args[0].values), tvm.DataType(str(alloc.args[1].value)))
    if isinstance(nbytes, int) or not bounds:
        return nbytes
    analyzer = tvm.sym.Analyzer()
    symbols: dict[tirx.Var, None] = {}
    structural_walk(nbytes, (tvm.ir.Var, lambda var: symbols.setdefault(var)))
    if any(str(symbol.name) not in bounds for symbol in symbols):
        return nbytes
    for symbol in symbols:
        analyzer.bind(symbol, tvm.ir.Range(0, bounds[str(symbol.name)] + 1))
    return int(analyzer.const_int_bound(nbytes).max_value)


_ONLY_READ = ("relax.shape_of", "relax.tensor_to_shape", "relax.assert_op", "relax.print")


def plan_memory_per_device(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    functions.update({gv: _planned(func, mod) for gv, func in relax_functions(mod)})
    return copy_module(mod, functions)


PlanMemoryPerDevice = declare_pass("PlanMemoryPerDevice", plan_memory_per_device)


def _planned(func: relax.Function, mod: tvm.IRModule) -> relax.Function:
    reader = _Reader(mod)
    reader.leave(reader.body(func.body, 0))
    bounds = upper_bounds(func)
    apart: dict[tuple[Any, ...], list[_Tensor]] = {}
    for tensor in reader.tensors:
        if not tensor.leaves:
            apart.setdefault(tensor.pool, []).append(tensor)
    places: dict[relax.Var, _Allocation] = {}
    for tensors in apart.values():
        sizes = [size_of(tensor.alloc, bounds) for tensor in tensors]
        plan = plan_storages([Lifetime(n, t.begin, t.end) for n, t in zip(sizes, tensors, strict=True)])
        made = [_Allocation(relax.Var("storage", relax.AnyType()), nbytes) for nbytes in plan.nbytes]
        places.update({tensor.var: made[number] for tensor, number in zip(tensors, plan.of, strict=True)})

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        place = places.get(binding.var)
        return binding if place is None else place.alloc(binding)

    return map_bindings(func, change)


@dataclass
class _Allocation:
    """A storage; it is allocated before the first tensor in it."""

    var: relax.Var
    nbytes: Any
    is_there: bool = False

    def alloc(self, binding: relax.Binding) -> list[relax.Binding]:
        """Bindings for one that allocates a tensor."""
        shape, dtype, device, scope = binding.value.args
        bindings: list[relax.Binding] = []
        if not self.is_there:
            self.is_there = True
            size = relax.ShapeExpr([self.nbytes])
            storage = relax.op.memory.alloc_storage(size, device, scope, "uint8")
            bindings.append(relax.VarBinding(self.var, _call(storage, self.var.ty)))
        tensor = relax.op.memory.alloc_tensor(self.var, 0, shape, dtype, device)
        bindings.append(relax.VarBinding(binding.var, _call(tensor, binding.var.ty), binding.span))
        return bindings


def _call(call: relax.Call, ty: tvm.ir.Type) -> relax.Call:
    return relax.Call(call.op, list(call.args), call.attrs, call.ty_args, ret_ty=ty)


@dataclass
class _Tensor:
    """An allocated tensor: the first and last binding that use it; `leaves` if something else may keep it."""

    var: relax.Var
    alloc: relax.Call
    branch: int
    begin: int = 0
    end: int = 0
    leaves: bool = False

    @property
    def pool(self) -> tuple[Any, ...]:
        """Tensors of one pool may share storage."""
        return self.branch, int(self.alloc.args[2].value), self.alloc.args[3].value


@dataclass
class _Reader:
    """Goes through a function in order; `now` counts the bindings."""

    mod: tvm.IRModule
    tensors: list[_Tensor] = field(default_factory=list)
    now: int = 0
    branches: int = 0
    _aliases: TensorAliases = field(default_factory=TensorAliases)

    def body(self, body: relax.SeqExpr, branch: int) -> Roots:
        """Read the bindings of a body, and what it shows."""
        for block in body.blocks:
            for binding in block.bindings:
                self.now += 1
                self._aliases.bind(binding.var, self._binding(binding.var, binding.value, branch))
        return self._aliases.of(body.body)

    def leave(self, roots: Roots) -> None:
        """These may be used by somebody else, who knows how long."""
        for number in flattened(roots):
            self.tensors[number].leaves = True

    def _binding(self, var: relax.Var, value: relax.Expr, branch: int) -> Roots:
        if isinstance(value, relax.If):
            self._use(value.cond)
            return merged([self._branch(body) for body in (value.true_branch, value.false_branch)])
        if op_name(value) == ALLOC:
            self.tensors.append(_Tensor(var, value, branch))
            return frozenset((len(self.tensors) - 1,))
        if not isinstance(value, relax.Call) or is_view(value):
            return self._aliases.of(value)
        for operand in used_vars(value):
            self._use(operand)
        if is_lowered_transfer(value):
            return self._transferred(*value.args)
        if not self._releases_operands(value):
            for operand in used_vars(value):
                self.leave(self._aliases.of(operand))
        return NOTHING

    def _transferred(
        self, source: relax.Expr, device: relax.Expr, must_copy: relax.Expr, buffer: relax.Expr | None = None
    ) -> Roots:
        """The room that is given to a transfer, or its operand, if two CPUs or two GPUs may be one."""
        shown = self._aliases.of(source)
        if buffer is None:
            return shown
        kind = self._kind(int(device.value))
        away = [
            number for number in flattened(shown) if self._kind(int(self.tensors[number].alloc.args[2].value)) != kind
        ]
        if int(must_copy.value) or away:
            return self._aliases.of(buffer)
        return merged([shown, self._aliases.of(buffer)])

    def _kind(self, device: int) -> int:
        vdevices = vdevices_of(self.mod)
        return CPU if device < 0 else backend_of(vdevices[device].target).device_type

    def _branch(self, body: relax.SeqExpr) -> Roots:
        self.branches += 1
        return self.body(body, self.branches)

    def _releases_operands(self, call: relax.Call) -> bool:
        """Return whether nothing keeps or returns the operands of a call."""
        if isinstance(call.op, tvm.ir.GlobalVar):
            return isinstance(self.mod.functions.get(call.op), tirx.PrimFunc)
        return op_name(call) in _ONLY_READ

    def _use(self, expr: relax.Expr) -> None:
        for number in flattened(self._aliases.of(expr)):
            tensor = self.tensors[number]
            tensor.begin, tensor.end = tensor.begin or self.now, self.now


@dataclass(frozen=True)
class Storages:
    """For each value the number of its storage, and each storage's bytes: ints, or expressions over symbols."""

    of: list[int]
    nbytes: list[Any]


def plan_storages(values: Sequence[Lifetime]) -> Storages:
    """Give values storages so that those that meet have different ones.

    Parameters
    ----------
    values : sequence of Lifetime
        Those that are there at one time, be it one command, meet.
    """
    of = [0] * len(values)
    nbytes: list[Any] = []
    for group in groups_by_unit(values):
        counts = [count for _, count in group.members]
        meetings = meetings_of([(count, values[i]) for i, count in group.members])
        lifetimes = [values[i] for i, _ in group.members]
        orders = (sorted(range(len(counts)), key=lambda i: order(counts[i], lifetimes[i])) for order in _ORDERS)
        shared, sizes = min((_assigned(counts, meetings, order) for order in orders), key=lambda plan: sum(plan[1]))
        for (i, _), storage in zip(group.members, shared, strict=True):
            of[i] = len(nbytes) + storage
        nbytes += [group.unit * size for size in sizes]
    return Storages(of, nbytes)


_ORDERS: tuple[Callable[[int, Lifetime], tuple[int, ...]], ...] = (
    lambda count, value: (-count, value.begin),
    lambda count, value: (value.begin, -count),
)
"""Largest first; earliest first."""


def _assigned(
    counts: Sequence[int], meetings: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Each value, in order, in the storage that is free and wastes least: none grows if one is large enough."""
    storage = [-1] * len(counts)
    sizes: list[int] = []
    for i in order:
        taken = {storage[j] for j in meetings[i]}
        free = [number for number in range(len(sizes)) if number not in taken]
        if free:
            best = min(free, key=lambda number: (max(counts[i] - sizes[number], 0), sizes[number]))
            sizes[best] = max(sizes[best], counts[i])
        else:
            best = len(sizes)
            sizes.append(counts[i])
        storage[i] = best
    return storage, sizes
