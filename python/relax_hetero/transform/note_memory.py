"""NoteMemory: what each function allocates, and from when to when, stands on it as data (`vm.memory_spec`).

Reads a module whose allocations are explicit and freed after their last use, and whose shapes are not lowered yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from ..vdevice import vdevice_index, vdevices_of
from ..vm.commands import RegionSpec
from ..vm.memory_spec import (
    ARENA,
    RESULT,
    TRANSFER,
    VALUE,
    CallStep,
    FunctionMemory,
    Live,
    RegionStep,
    Storage,
    memory_from_json,
    memory_to_json,
)
from ..vm.signature import Dim
from .command_report import regions_of
from .dim_text import NoTextError, dim_text
from .lower_transfers import TO_DEVICE
from .rewriting import copy_module, op_name, relax_functions, tensor_types
from .stage import MEMORY

UPPER_BOUND = "tir_var_upper_bound"
"""On a Relax function, as stock TVM reads it: the most that symbolic dimensions of these names will be."""

_KILLS = ("relax.memory.kill_storage", "relax.memory.kill_tensor", "relax.vm.kill_object")
_VIEWS = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
_OPEN = -1

# The tensors that an expression is, by number; fields of a tuple one by one.
_Shown: TypeAlias = "frozenset[int] | tuple[_Shown, ...]"
_NOTHING: frozenset[int] = frozenset()


def NoteMemory() -> tvm.transform.Pass:
    """Note on each Relax function what it allocates.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="NoteMemory")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        regions = {region.name: region for region in regions_of(mod)}
        functions = dict(mod.functions.items())
        for gv, func in relax_functions(mod):
            memory = function_memory(gv.name_hint, func, mod, regions)
            functions[gv] = func.with_attr(MEMORY, json.dumps(memory_to_json(memory)))
        return copy_module(mod, functions)

    return run


def memory_of(mod: tvm.IRModule) -> tuple[FunctionMemory, ...]:
    """What the functions of a module allocate, as `NoteMemory` left it."""
    texts = [func.attrs[MEMORY] for _, func in relax_functions(mod) if MEMORY in func.attrs]
    return tuple(memory_from_json(json.loads(str(text))) for text in texts)


def function_memory(
    name: str, func: relax.Function, mod: tvm.IRModule, regions: dict[str, RegionSpec]
) -> FunctionMemory:
    """What one function allocates.

    Parameters
    ----------
    name : str
    func : relax.Function
        Of `mod`.
    mod : tvm.IRModule
    regions : dict of str to RegionSpec
        The module's command buffers.
    """
    reader = _Reader(mod, regions)
    result = reader.body(func.body)
    storages = reader.finished(set(_flat(result)))
    bounds = func.attrs.get(UPPER_BOUND) or {}
    return FunctionMemory(
        name,
        storages,
        tuple(Live(t.storage, t.nbytes, t.begin, t.end) for t in reader.tensors),
        tuple(reader.regions),
        tuple(reader.calls),
        {str(symbol): int(bound) for symbol, bound in bounds.items()},
    )


@dataclass
class _Storage:
    device: int
    nbytes: Dim
    begin: int
    end: int = _OPEN
    use: str = VALUE


@dataclass
class _Tensor:
    storage: int
    nbytes: Dim
    begin: int = _OPEN
    end: int = _OPEN
    name: str = ""


@dataclass
class _Reader:
    """Goes through a function in order; `now` is the number of the next step."""

    mod: tvm.IRModule
    specs: dict[str, RegionSpec]
    now: int = 0
    storages: list[_Storage] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)
    regions: list[RegionStep] = field(default_factory=list)
    calls: list[CallStep] = field(default_factory=list)
    _rooms: dict[relax.Var, int] = field(default_factory=dict)
    _shown: dict[relax.Var, _Shown] = field(default_factory=dict)

    def body(self, body: relax.SeqExpr) -> _Shown:
        """Read the bindings of a body; the tensors it gives."""
        for block in body.blocks:
            for binding in block.bindings:
                self._binding(binding.var, binding.value)
        return self._of(body.body)

    def finished(self, results: set[int]) -> tuple[Storage, ...]:
        """The storages, once everything is read; `results` are the tensors that leave the call."""
        names: dict[int, str] = {}
        for tensor in self.tensors:
            names.setdefault(tensor.storage, tensor.name)
        for number in results:
            place = self.storages[self.tensors[number].storage]
            place.use, place.end = RESULT, _OPEN
        return tuple(
            Storage(place.device, place.nbytes, place.begin, place.end, place.use, names.get(number, ""))
            for number, place in enumerate(self.storages)
        )

    def _binding(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.If):
            self._touch(self._of(value.cond))
            self._shown[var] = _merged(self.body(value.true_branch), self.body(value.false_branch))
        elif not isinstance(value, relax.Call):
            self._shown[var] = self._of(value)
        elif op_name(value) == "relax.memory.alloc_storage":
            self._rooms[var] = len(self.storages)
            device = int(value.args[1].value)
            self.storages.append(_Storage(device, _product(value.args[0].values), self.now))
        elif op_name(value) == "relax.memory.alloc_tensor":
            self._shown[var] = self._tensor(self._rooms[value.args[0]], value.args[2].values, value.args[3].value)
        elif op_name(value) in _KILLS:
            self._kill(value.args[0])
        elif op_name(value) in _VIEWS:
            self._shown[var] = self._of(value.args[0])
        else:
            self._shown[var] = self._step(var, value)

    def _tensor(self, storage: int, shape: Any, dtype: Any) -> _Shown:
        element = tvm.DataType(str(dtype))
        bits = element.bits * element.lanes
        self.tensors.append(_Tensor(storage, _product(shape, (bits + 7) // 8)))
        return frozenset((len(self.tensors) - 1,))

    def _kill(self, var: relax.Var) -> None:
        """A register lets go of what it shows; the last one that does so gives the storage back."""
        for number in _flat(self._of(var)):
            self.storages[self.tensors[number].storage].end = self.now - 1

    def _step(self, var: relax.Var, call: relax.Call) -> _Shown:
        callee = call.op.name_hint if isinstance(call.op, tvm.ir.GlobalVar) else ""
        spec = self.specs.get(callee)
        operands = [self._of(arg) for arg in call.args]
        name = callee or ("a transfer" if _is_transfer(call) else str(getattr(call.op, "global_symbol", call.op)))
        for shown in operands:
            self._touch(shown, name)
        if spec is not None:
            self._region(call, spec, operands)
        made: _Shown = _NOTHING
        if _is_transfer(call) and len(call.args) == 4:
            made = operands[3]  # it arrives there
            self.storages[self.tensors[next(_flat(made))].storage].use = TRANSFER
        elif callee and isinstance(self.mod[callee], relax.Function):
            self.calls.append(CallStep(self.now, callee, _sizes(self.mod[callee].params, call.args)))
            made = self._made(var.ty, name)
        elif isinstance(call.op, relax.ExternFunc | relax.Var):
            made = self._made(var.ty, name)
        self.now += 1
        return made

    def _made(self, ty: tvm.ir.Type, name: str) -> _Shown:
        """Tensors that another function allocates and gives, which are here from the next step on."""
        if isinstance(ty, tvm.ir.TupleType):
            return tuple(self._made(part, name) for part in ty.fields)
        if not (isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and ty.dtype):
            return _NOTHING
        vdevices = vdevices_of(self.mod)
        device = vdevice_index(ty.vdevice, vdevices) if ty.vdevice is not None else 0
        shown = self._tensor(len(self.storages), ty.shape.values, ty.dtype.dtype)
        (made,) = (self.tensors[number] for number in _flat(shown))
        made.begin = made.end = self.now + 1
        made.name = name
        self.storages.append(_Storage(device, made.nbytes, self.now + 1))
        return shown

    def _region(self, call: relax.Call, spec: RegionSpec, operands: list[_Shown]) -> None:
        """Inputs, then results, then the arena; constants and numbers lie between."""
        given = [
            shown
            for arg, shown in zip(call.args, operands, strict=True)
            if isinstance(arg, relax.Var) and isinstance(arg.ty, relax.TensorType)
        ]
        slots = [next(_flat(shown), -1) for shown in given]
        if len(slots) > len(spec.slots):
            arena = self.tensors[slots.pop()]
            arena.name, arena.nbytes = f"the arena of {spec.name}", 0  # what lies in it is counted instead
            self.storages[arena.storage].use = ARENA
        for number, slot in zip(slots, spec.slots, strict=True):
            if number >= 0 and self.tensors[number].begin == self.now:
                self.tensors[number].name = slot.name
        self.regions.append(RegionStep(self.now, spec.name, tuple(slots)))

    def _touch(self, shown: _Shown, name: str = "If") -> None:
        for number in _flat(shown):
            tensor = self.tensors[number]
            if tensor.begin == _OPEN:
                tensor.begin, tensor.name = self.now, name
            tensor.end = self.now

    def _of(self, expr: relax.Expr) -> _Shown:
        if isinstance(expr, relax.Tuple):
            return tuple(self._of(part) for part in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self._of(expr.tuple_value)
            return whole[expr.index] if isinstance(whole, tuple) else whole
        return self._shown.get(expr, _NOTHING) if isinstance(expr, relax.Var) else _NOTHING


def _is_transfer(call: relax.Call) -> bool:
    return isinstance(call.op, relax.ExternFunc) and call.op.global_symbol == TO_DEVICE


def _flat(shown: _Shown) -> Iterator[int]:
    if isinstance(shown, tuple):
        for part in shown:
            yield from _flat(part)
    else:
        yield from sorted(shown)


def _merged(left: _Shown, right: _Shown) -> _Shown:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return tuple(_merged(a, b) for a, b in zip(left, right, strict=True))
    return frozenset((*_flat(left), *_flat(right)))


def _product(extents: Any, count: int = 1) -> Dim:
    """`count` times some extents: a number or text, which nobody can evaluate where an extent is beyond its grammar."""
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
    if not symbolic:
        return count
    return "*".join([str(count), *symbolic] if count != 1 else symbolic)


def _sizes(params: Any, args: Any) -> dict[str, Dim]:
    """The symbolic dimensions that a function's parameters name, by what a caller gives."""
    found: dict[str, Dim] = {}
    for param, arg in zip(params, args, strict=False):
        for wanted, given in zip(tensor_types(param.ty), tensor_types(arg.ty), strict=False):
            if isinstance(wanted.shape, relax.ShapeExpr) and isinstance(given.shape, relax.ShapeExpr):
                for dim, extent in zip(wanted.shape.values, given.shape.values, strict=True):
                    if isinstance(dim, tirx.Var):
                        found.setdefault(str(dim.name), _product([extent]))
    return found
