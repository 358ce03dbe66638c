"""PinTransferred: tensors that go from a CPU to a GPU are allocated in pinned memory, for copies at full rate.

Before::

    a: R.Tensor((65536,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([65536]), "float32", 0, "global")
    cls.kernel(x, a)
    b: R.Tensor((65536,), "float32", "cuda:0") = R.call_packed("relax_hetero.to_device", a, 1, 0, buffer)

After::

    a: R.Tensor((65536,), "float32", "llvm:0") = R.builtin.alloc_tensor(R.shape([65536]), "float32", 0, "pinned")

For a device in the host's memory, the run time takes the device's memory, and the transfer is an alias. The caller of a
plain call may change its results while the device works, so that they stay where they are.

Results of a schedule's step are allocated alike if the next step is their transfer. Tensors of less than
`PINNED_BYTES` stay where they are; those of unknown size are pinned, and the run time decides again. The memory scope
"pinned" lasts until storage is planned, as tensors of different scopes share none. `LowerPinnedStorage` lowers it.

Assumes that transfers are lowered (LowerTransfers) and memory is not planned yet. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tvm
from tvm import relax

from ...target.backend import backend_of
from ...target.vdevice import is_cpu, vdevices_of
from ...vm.device.memory_pools import PINNED_BYTES
from ..ir.declare import declare_pass
from ..ir.rewriting import map_bindings, op_name, relax_functions, with_functions
from ..ir.tensor_aliases import NOTHING, Roots, TensorAliases, flattened, is_view, merged
from ..partition.form_schedules import schedules_of
from .lower_transfers import is_lowered_transfer
from .plan_memory import ALLOC, size_of, upper_bounds

PINNED = "pinned"  # memory scope of pinned allocations on CPUs


def pin_transferred(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if not any(map(_copies_pinned, vdevices_of(mod))):
        return mod
    transferred = _transferred_results(mod)
    return with_functions(
        mod, {gv: _pinned(func, mod, transferred.get(gv.name_hint, ())) for gv, func in relax_functions(mod)}
    )


PinTransferred = declare_pass("PinTransferred", pin_transferred)


def _copies_pinned(vdevice: relax.VDevice) -> bool:
    backend = backend_of(vdevice.target)
    return backend.pins_memory or backend.may_share_memory(vdevice.target)


def _transferred_results(mod: tvm.IRModule) -> dict[str, tuple[int, ...]]:
    """Positions of the results that transfers copy to a GPU, by function that is a step of a schedule."""
    vdevices = vdevices_of(mod)
    positions: dict[str, tuple[int, ...]] = {}
    for schedule in schedules_of(mod):
        transferred: set[int] = set()
        for step in reversed(schedule.steps):
            if not step.is_transfer:
                positions[step.function] = tuple(
                    position for position, value in enumerate(step.makes) if value in transferred
                )
            elif _copies_pinned(vdevices[step.device]) or step.makes[0] in transferred:
                transferred.add(step.reads[0])
    return positions


def _pinned(func: relax.Function, mod: tvm.IRModule, results: tuple[int, ...]) -> relax.Function:
    walk = _AliasWalk(vdevices_of(mod))
    roots = walk.body(func.body)
    fields = roots if isinstance(roots, tuple) else (roots,)
    if any(backend_of(vdevice.target).may_share_memory(vdevice.target) for vdevice in vdevices_of(mod)):
        walk.transferred -= set(flattened(roots))
    for position in results:
        walk.transferred.update(flattened(fields[position]))
    bounds = upper_bounds(func)
    allocations = [walk.allocated[number] for number in walk.transferred]
    chosen = {binding.var for binding in allocations if _is_large(binding, bounds)}

    def change(binding: relax.Binding) -> relax.Binding:
        if binding.var not in chosen:
            return binding
        shape, dtype, device, _ = binding.value.args
        call = relax.Call(binding.value.op, [shape, dtype, device, tvm.ir.StringImm(PINNED)], ret_ty=binding.value.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    return map_bindings(func, change)


def _is_large(binding: relax.Binding, bounds: Mapping[str, int]) -> bool:
    nbytes = size_of(binding.value, bounds)
    return not isinstance(nbytes, int) or nbytes >= PINNED_BYTES


@dataclass
class _AliasWalk:
    """A walk over a function in order."""

    vdevices: list[relax.VDevice]
    # Bindings that allocate in the "global" memory of a CPU.
    allocated: list[relax.Binding] = field(default_factory=list)
    transferred: set[int] = field(default_factory=set)  # numbers of the allocations that transfers copy to a GPU
    _aliases: TensorAliases = field(default_factory=TensorAliases)

    def body(self, body: relax.SeqExpr) -> Roots:
        """Walk the bindings of a body; returns the allocations that its result aliases."""
        for block in body.blocks:
            for binding in block.bindings:
                self._aliases.bind(binding.var, self._binding(binding))
        return self._aliases.of(body.body)

    def _binding(self, binding: relax.Binding) -> Roots:
        value = binding.value
        if isinstance(value, relax.If):
            return merged([self.body(branch) for branch in (value.true_branch, value.false_branch)])
        if op_name(value) == ALLOC:
            if not self._is_plain(value):
                return NOTHING
            self.allocated.append(binding)
            return frozenset((len(self.allocated) - 1,))
        if is_lowered_transfer(value):
            source, device, _, *buffer = value.args
            if _copies_pinned(self.vdevices[int(device.value)]):
                self.transferred.update(flattened(self._aliases.of(source)))
                return NOTHING
            return merged([self._aliases.of(operand) for operand in (source, *buffer)])
        return self._aliases.of(value) if not isinstance(value, relax.Call) or is_view(value) else NOTHING

    def _is_plain(self, alloc: relax.Call) -> bool:
        device = int(alloc.args[2].value)
        return alloc.args[3].value == "global" and (device < 0 or is_cpu(self.vdevices[device]))
