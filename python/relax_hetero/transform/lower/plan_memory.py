"""PlanMemoryPerDevice: tensors of a function with disjoint lifetimes share storage, within a device.

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

TVM's planner shares storage between devices, and between branches of an `If`; it frees operands of a packed function
right after the call, although a user's function may return its operand, and it plans no operand of a transfer.
Here each device and each branch has its own plan, and tensors that escape, to the caller or to a function that may keep
or return them, are left to the machine's pool. A transfer may return its operand or its receive buffer: both stay.

Symbolic sizes are planned by their upper bounds if the function has some (`tir_var_upper_bound`), else together with
sizes of the same symbols.

`plan_storages` tries two greedy orders, and takes the one that needs fewer bytes.

Assumes no dataflow blocks and purity checks removed. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ...artifact.metadata import CPU
from ...target.backend import backend_of
from ...target.vdevice import vdevices_of
from ...tir.core.builder import plain_extent
from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.kernels import bytes_of_extents
from ..ir.requirements import symbols_in
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, with_functions
from ..ir.tensor_aliases import NOTHING, Roots, TensorAliases, flattened, is_view, merged
from ..record.plan_arena import Lifetime, groups_by_unit, overlaps_of
from .lower_transfers import STREAM_TO_DEVICE, is_lowered_transfer

ALLOC = "relax.builtin.alloc_tensor"  # the op that allocates a tensor, before memory is planned

UPPER_BOUND = "tir_var_upper_bound"
"""Function attribute, which stock TVM reads too: upper bounds of symbolic dimensions by name."""


def upper_bounds(func: relax.Function) -> dict[str, int]:
    """Upper bounds of a function's symbolic dimensions, where they are annotated."""
    return {str(name): int(bound) for name, bound in (func.attrs.get(UPPER_BOUND) or {}).items()}


def size_of(alloc: relax.Call, bounds: Mapping[str, int]) -> Any:
    """The bytes of an allocation: the maximum if all its symbols have upper bounds, else symbolic."""
    nbytes = bytes_of_extents(map(plain_extent, alloc.args[0].values), tvm.DataType(str(alloc.args[1].value)))
    if isinstance(nbytes, int) or not bounds:
        return nbytes
    analyzer = tvm.sym.Analyzer()
    symbols = symbols_in(nbytes)
    if any(str(symbol.name) not in bounds for symbol in symbols):
        return nbytes
    for symbol in symbols:
        analyzer.bind(symbol, tvm.ir.Range(0, bounds[str(symbol.name)] + 1))
    return int(analyzer.const_int_bound(nbytes).max_value)


_READ_ONLY_OPS = ("relax.shape_of", "relax.tensor_to_shape", "relax.assert_op", "relax.print")


def plan_memory_per_device(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    return with_functions(mod, {gv: _planned(func, mod) for gv, func in relax_functions(mod)})


PlanMemoryPerDevice = declare_pass("PlanMemoryPerDevice", plan_memory_per_device)


def _planned(func: relax.Function, mod: tvm.IRModule) -> relax.Function:
    walk = _LifetimeWalk(mod)
    walk.escape(walk.body(func.body, 0))
    bounds = upper_bounds(func)
    pools: dict[tuple[Any, ...], list[_Tensor]] = {}
    for tensor in walk.tensors:
        if not tensor.escapes:
            pools.setdefault(tensor.pool, []).append(tensor)
    storage_of: dict[relax.Var, _Storage] = {}
    for tensors in pools.values():
        sizes = [size_of(tensor.alloc, bounds) for tensor in tensors]
        plan = plan_storages([Lifetime(n, t.begin, t.end) for n, t in zip(sizes, tensors, strict=True)])
        storages = [_Storage(relax.Var("storage", relax.AnyType()), nbytes) for nbytes in plan.nbytes]
        storage_of.update({tensor.var: storages[number] for tensor, number in zip(tensors, plan.of, strict=True)})

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        storage = storage_of.get(binding.var)
        return binding if storage is None else storage.alloc(binding)

    return map_bindings(func, change)


@dataclass
class _Storage:
    """A storage, which is allocated before its first tensor."""

    var: relax.Var
    nbytes: Any
    is_allocated: bool = False

    def alloc(self, binding: relax.Binding) -> list[relax.Binding]:
        """Bindings that replace the allocation of a tensor."""
        shape, dtype, device, scope = binding.value.args
        bindings: list[relax.Binding] = []
        if not self.is_allocated:
            self.is_allocated = True
            storage = relax.op.memory.alloc_storage(relax.ShapeExpr([self.nbytes]), device, scope, "uint8")
            bindings.append(relax.VarBinding(self.var, typed(storage, self.var.ty)))
        tensor = relax.op.memory.alloc_tensor(self.var, 0, shape, dtype, device)
        bindings.append(relax.VarBinding(binding.var, typed(tensor, binding.var.ty), binding.span))
        return bindings


@dataclass
class _Tensor:
    """An allocated tensor, with the first and last binding that use it; `escapes` if other code may keep it."""

    var: relax.Var
    alloc: relax.Call
    branch: int
    begin: int = 0
    end: int = 0
    escapes: bool = False

    @property
    def pool(self) -> tuple[Any, ...]:
        """Key of the tensors that may share storage."""
        return self.branch, int(self.alloc.args[2].value), self.alloc.args[3].value


@dataclass
class _LifetimeWalk:
    """A walk over a function in order; `now` counts the bindings."""

    mod: tvm.IRModule
    tensors: list[_Tensor] = field(default_factory=list)
    now: int = 0
    branches: int = 0
    _streamed: Roots = NOTHING
    _aliases: TensorAliases = field(default_factory=TensorAliases)

    def body(self, body: relax.SeqExpr, branch: int) -> Roots:
        """Walk the bindings of a body; returns the tensors that its result aliases."""
        for block in body.blocks:
            for binding in block.bindings:
                self.now += 1
                self._aliases.bind(binding.var, self._binding(binding.var, binding.value, branch))
        return self._aliases.of(body.body)

    def escape(self, roots: Roots) -> None:
        """Mark tensors that other code may keep."""
        for number in flattened(roots):
            self.tensors[number].escapes = True

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
            if str(value.op.global_symbol) == STREAM_TO_DEVICE:
                self._keep_streamed(value.args[3])
            return self._transferred(*value.args)
        if not self._releases_operands(value):
            for operand in used_vars(value):
                self.escape(self._aliases.of(operand))
        return NOTHING

    def _keep_streamed(self, buffer: relax.Expr) -> None:
        """Let the constant that was streamed before live until now, so that this copy needs not wait for its readers.

        Their memory alternates.
        """
        for number in flattened(self._streamed):
            self.tensors[number].end = max(self.tensors[number].end, self.now)
        self._streamed = self._aliases.of(buffer)

    def _transferred(
        self, source: relax.Expr, device: relax.Expr, must_copy: relax.Expr, buffer: relax.Expr | None = None
    ) -> Roots:
        """The receive buffer of a transfer, or its operand if two CPUs or two GPUs may be the same device."""
        roots = self._aliases.of(source)
        if buffer is None:
            return roots
        sources = {self._device_type(int(self.tensors[n].alloc.args[2].value)) for n in flattened(roots)}
        if int(must_copy.value) or sources - {self._device_type(int(device.value))}:
            return self._aliases.of(buffer)
        return merged([roots, self._aliases.of(buffer)])

    def _device_type(self, device: int) -> int:
        vdevices = vdevices_of(self.mod)
        return CPU if device < 0 else backend_of(vdevices[device].target).device_type

    def _branch(self, body: relax.SeqExpr) -> Roots:
        self.branches += 1
        return self.body(body, self.branches)

    def _releases_operands(self, call: relax.Call) -> bool:
        """Return whether a call neither keeps nor returns its operands."""
        if isinstance(call.op, tvm.ir.GlobalVar):
            return isinstance(self.mod.functions.get(call.op), tirx.PrimFunc)
        return op_name(call) in _READ_ONLY_OPS

    def _use(self, expr: relax.Expr) -> None:
        for number in flattened(self._aliases.of(expr)):
            tensor = self.tensors[number]
            tensor.begin, tensor.end = tensor.begin or self.now, self.now


@dataclass(frozen=True)
class Storages:
    """Numbers of the values' storages, and bytes of each storage: ints, or expressions over symbols."""

    of: list[int]
    nbytes: list[Any]


def plan_storages(values: Sequence[Lifetime]) -> Storages:
    """Assign storages to values so that values with overlapping lifetimes have different ones.

    `values`: values that are live during the same command overlap.
    """
    of = [0] * len(values)
    nbytes: list[Any] = []
    for group in groups_by_unit(values):
        counts = [count for _, count in group.members]
        overlaps = overlaps_of([(count, values[i]) for i, count in group.members])
        lifetimes = [values[i] for i, _ in group.members]
        orders = (sorted(range(len(counts)), key=lambda i: order(counts[i], lifetimes[i])) for order in _ORDERS)
        shared, sizes = min((_assigned(counts, overlaps, order) for order in orders), key=lambda plan: sum(plan[1]))
        for (i, _), storage in zip(group.members, shared, strict=True):
            of[i] = len(nbytes) + storage
        nbytes += [group.unit * size for size in sizes]
    return Storages(of, nbytes)


_ORDERS: tuple[Callable[[int, Lifetime], tuple[int, ...]], ...] = (
    lambda count, value: (-count, value.begin),
    lambda count, value: (value.begin, -count),
)
"""Sort keys of greedy assignment: largest first; earliest first."""


def _assigned(
    counts: Sequence[int], overlaps: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Assign each value, in order, to the best free storage: one that grows least, of these the smallest."""
    storage = [-1] * len(counts)
    sizes: list[int] = []
    for i in order:
        used = {storage[j] for j in overlaps[i]}
        free = [number for number in range(len(sizes)) if number not in used]
        if free:
            best = min(free, key=lambda number: (max(counts[i] - sizes[number], 0), sizes[number]))
            sizes[best] = max(sizes[best], counts[i])
        else:
            best = len(sizes)
            sizes.append(counts[i])
        storage[i] = best
    return storage, sizes
