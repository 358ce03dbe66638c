"""AnnotateMemory: functions get their allocations and the lifetimes of these as data (`artifact.memory_spec`).

Before::

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0")):
        storage = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")
        alloc = R.memory.alloc_tensor(storage, 0, R.shape([4]), "float32", 0)
        cls.kernel(x, alloc)
        return alloc

After, the same with::

    R.func_attr({"relax_hetero.memory": '{"name": "main", "storages": [{"nbytes": 64, ...}], ...}'})

Assumes that allocations are explicit and freed after their last use (KillAfterLastUse), and that shapes are not lowered
yet (VMShapeLower). A second run changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ...artifact.commands import GRAPH, WRITE, RegionSpec
from ...artifact.memory_spec import (
    ARENA,
    RESULT,
    TRANSFER,
    VALUE,
    CallStep,
    FunctionMemory,
    Live,
    RegionStep,
    StorageSpec,
)
from ...artifact.signature import Dim
from ...artifact.typed_data import from_data, to_data
from ...target.vdevice import vdevice_index, vdevices_of
from ..ir.declare import declare_pass
from ..ir.extents import NoTextError, dim_text
from ..ir.kernels import tensor_bytes
from ..ir.module_attrs import MEMORY
from ..ir.rewriting import op_name, relax_functions, tensor_types, with_functions
from ..ir.tensor_aliases import NOTHING, Roots, TensorAliases, flattened, is_view, merged
from ..record.region_attrs import regions_of
from .lower_transfers import is_lowered_transfer
from .plan_memory import upper_bounds

_KILLS = ("relax.memory.kill_storage", "relax.memory.kill_tensor", "relax.vm.kill_object")
_UNKNOWN = -1


def annotate_memory(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    regions = {region.name: region for region in regions_of(mod)}
    memories = {gv: function_memory(gv.name_hint, func, mod, regions) for gv, func in relax_functions(mod)}
    return with_functions(mod, {gv: mod[gv].with_attr(MEMORY, json.dumps(to_data(m))) for gv, m in memories.items()})


AnnotateMemory = declare_pass("AnnotateMemory", annotate_memory)


def memory_of(mod: tvm.IRModule) -> tuple[FunctionMemory, ...]:
    """Memory that the functions of a module allocate, as `AnnotateMemory` recorded it."""
    texts = [func.attrs[MEMORY] for _, func in relax_functions(mod) if MEMORY in func.attrs]
    return tuple(from_data(FunctionMemory, json.loads(str(text))) for text in texts)


def function_memory(
    name: str, func: relax.Function, mod: tvm.IRModule, regions: dict[str, RegionSpec]
) -> FunctionMemory:
    """Memory that one function allocates. `func`: function of `mod`. `regions`: the module's command buffers."""
    walk = _MemoryWalk(mod, regions)
    storages = walk.finished(set(flattened(walk.body(func.body))))
    return FunctionMemory(
        name,
        storages,
        tuple(Live(t.storage, t.nbytes, t.begin, t.end) for t in walk.tensors),
        tuple(walk.regions),
        tuple(walk.calls),
        upper_bounds(func),
        _result_sizes(func.ret_ty),
    )


@dataclass
class _Storage:
    device: int
    nbytes: Dim
    begin: int
    end: int = _UNKNOWN
    use: str = VALUE


@dataclass
class _Tensor:
    storage: int
    nbytes: Dim
    begin: int = _UNKNOWN
    end: int = _UNKNOWN
    name: str = ""


@dataclass
class _MemoryWalk:
    """A walk over a function in order; `now` is the number of the next step."""

    mod: tvm.IRModule
    specs: dict[str, RegionSpec]
    now: int = 0
    storages: list[_Storage] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)
    regions: list[RegionStep] = field(default_factory=list)
    calls: list[CallStep] = field(default_factory=list)
    _storage_of: dict[relax.Var, int] = field(default_factory=dict)
    _aliases: TensorAliases = field(default_factory=TensorAliases)

    def body(self, body: relax.SeqExpr) -> Roots:
        """Walk the bindings of a body; returns the tensors of its result."""
        for block in body.blocks:
            for binding in block.bindings:
                self._binding(binding.var, binding.value)
        return self._aliases.of(body.body)

    def finished(self, results: set[int]) -> tuple[StorageSpec, ...]:
        """The storages, at the end of the walk; `results` are the tensors that the call returns."""
        names: dict[int, str] = {}
        for tensor in self.tensors:
            names.setdefault(tensor.storage, tensor.name)
        for number in results:
            storage = self.storages[self.tensors[number].storage]
            storage.use, storage.end = RESULT, _UNKNOWN
        return tuple(
            StorageSpec(storage.device, storage.nbytes, storage.begin, storage.end, storage.use, names.get(number, ""))
            for number, storage in enumerate(self.storages)
        )

    def _binding(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.If):
            self._touch(self._aliases.of(value.cond))
            self._aliases.bind(var, merged((self.body(value.true_branch), self.body(value.false_branch))))
        elif not isinstance(value, relax.Call) or is_view(value):
            self._aliases.bind(var, self._aliases.of(value))
        elif op_name(value) == "relax.memory.alloc_storage":
            self._storage_of[var] = len(self.storages)
            device = int(value.args[1].value)
            self.storages.append(_Storage(device, _product(value.args[0].values), self.now))
        elif op_name(value) == "relax.memory.alloc_tensor":
            self._aliases.bind(
                var, self._tensor(self._storage_of[value.args[0]], value.args[2].values, value.args[3].value)
            )
        elif op_name(value) in _KILLS:
            self._kill(value.args[0])
        else:
            self._aliases.bind(var, self._step(var, value))

    def _tensor(self, storage: int, shape: Any, dtype: Any) -> Roots:
        self.tensors.append(_Tensor(storage, _product(shape, tensor_bytes((), tvm.DataType(str(dtype))))))
        return frozenset((len(self.tensors) - 1,))

    def _kill(self, var: relax.Var) -> None:
        """End the lifetime of the storages that a register aliases; the last register decides."""
        for number in flattened(self._aliases.of(var)):
            storage = self.storages[self.tensors[number].storage]
            storage.end = max(self.now - 1, storage.begin)  # an unread result of a function begins later

    def _step(self, var: relax.Var, call: relax.Call) -> Roots:
        callee = call.op.name_hint if isinstance(call.op, tvm.ir.GlobalVar) else ""
        spec = self.specs.get(callee)
        operands = [self._aliases.of(arg) for arg in call.args]
        name = callee or (
            "a transfer" if is_lowered_transfer(call) else str(getattr(call.op, "global_symbol", call.op))
        )
        for roots in operands:
            self._touch(roots, name)
        if spec is not None:
            self._region(call, spec, operands)
        result: Roots = NOTHING
        if is_lowered_transfer(call):
            # The result is in the transfer's receive buffer if there is one, else it aliases the operand.
            result = operands[-1] if len(call.args) == 4 else operands[0]
            if len(call.args) == 4:
                self.storages[self.tensors[next(flattened(result))].storage].use = TRANSFER
        elif callee and isinstance(self.mod[callee], relax.Function):
            self.calls.append(CallStep(self.now, callee, _sizes(self.mod[callee].params, call.args)))
            result = self._returned(var.ty, name)
        elif isinstance(call.op, relax.ExternFunc | relax.Var):
            result = self._returned(var.ty, name)
        self.now += 1
        return result

    def _returned(self, ty: tvm.ir.Type, name: str) -> Roots:
        """Tensors that another function allocates and returns, which live from the next step on."""
        if isinstance(ty, tvm.ir.TupleType):
            return tuple(self._returned(field, name) for field in ty.fields)
        if not (isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and ty.dtype):
            return NOTHING
        vdevices = vdevices_of(self.mod)
        device = vdevice_index(ty.vdevice, vdevices) if ty.vdevice is not None else 0
        roots = self._tensor(len(self.storages), ty.shape.values, ty.dtype.dtype)
        tensor = self.tensors[-1]
        tensor.begin = tensor.end = self.now + 1
        tensor.name = name
        self.storages.append(_Storage(device, tensor.nbytes, self.now + 1))
        return roots

    def _region(self, call: relax.Call, spec: RegionSpec, operands: list[Roots]) -> None:
        """Record a call of a command buffer; its tensors are inputs, its own constants, results, and the arena."""
        tensors = [
            roots for arg, roots in zip(call.args, operands, strict=True) if isinstance(arg.ty, relax.TensorType)
        ]
        num_inputs = sum(slot.access != WRITE for slot in spec.slots)
        # A graph has the addresses of its constants in one operand, its state.
        del tensors[num_inputs : num_inputs + (1 if spec.runs == GRAPH else len(spec.directs))]
        slots = [next(flattened(roots), -1) for roots in tensors]  # -1: a constant
        if len(slots) > len(spec.slots):
            arena = self.tensors[slots.pop()]
            arena.name, arena.nbytes = f"the arena of {spec.name}", 0  # its values are counted instead
            self.storages[arena.storage].use = ARENA
        for number, slot in zip(slots, spec.slots, strict=True):
            if number >= 0 and self.tensors[number].begin == self.now:
                self.tensors[number].name = slot.name
        self.regions.append(RegionStep(self.now, spec.name, tuple(slots)))

    def _touch(self, roots: Roots, name: str = "If") -> None:
        for number in flattened(roots):
            tensor = self.tensors[number]
            if tensor.begin == _UNKNOWN:
                tensor.begin, tensor.name = self.now, name
            tensor.end = self.now


def _result_sizes(ty: tvm.ir.Type) -> tuple[Dim, ...]:
    """Bytes of the tensors in a type, for a tuple those of each field; 0 for tensors of unknown shape."""
    fields = ty.fields if isinstance(ty, tvm.ir.TupleType) else [ty]
    return tuple(_sum(map(_tensor_size, tensor_types(field))) for field in fields)


def _tensor_size(ty: relax.TensorType) -> Dim:
    is_known = isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None
    return _product(ty.shape.values, tensor_bytes((), ty.dtype.dtype)) if is_known else 0


def _sum(sizes: Iterable[Dim]) -> Dim:
    terms = list(sizes)
    if all(isinstance(term, int) for term in terms):
        return sum(term for term in terms if isinstance(term, int))
    return " + ".join(map(str, terms))


def _product(extents: Any, count: int = 1) -> Dim:
    """`count` times extents: an int or text, which cannot be evaluated if an extent is beyond the grammar."""
    symbolic: list[str] = []
    for extent in extents:
        try:
            text = dim_text(extent)
        except NoTextError:
            text = str(extent)
        if isinstance(text, int):
            count *= text
        else:
            symbolic.append(text)
    return count if not symbolic else "*".join([str(count), *symbolic] if count != 1 else symbolic)


def _sizes(params: Any, args: Any) -> dict[str, Dim]:
    """The sizes of a function's parameters, in sizes of a caller's arguments."""
    sizes: dict[str, Dim] = {}
    for param, arg in zip(params, args, strict=False):
        for param_ty, arg_ty in zip(tensor_types(param.ty), tensor_types(arg.ty), strict=False):
            if isinstance(param_ty.shape, relax.ShapeExpr) and isinstance(arg_ty.shape, relax.ShapeExpr):
                for dim, extent in zip(param_ty.shape.values, arg_ty.shape.values, strict=True):
                    if isinstance(dim, tirx.Var):
                        sizes.setdefault(str(dim.name), _product([extent]))
    return sizes
