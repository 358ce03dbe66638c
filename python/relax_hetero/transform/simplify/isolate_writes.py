"""IsolateWrites: what a kernel in place overwrites is its own, and nothing that reads it moves past the kernel.

Before::

    with R.dataflow():
        y: R.Tensor((4,), "float32", "llvm:0") = R.permute_dims(x, [0])
        doubled = R.add(x, x)
        z = R.call_tir_inplace(cls.increment, (y,), inplace_indices=[0], out_ty=R.Tensor((4,), "float32", "llvm:0"))

After::

    with R.dataflow():
        y_shared: R.Tensor((4,), "float32", "llvm:0") = R.permute_dims(x, [0])
        y: R.Tensor((4,), "float32", "llvm:0") = R.hetero.copy(y_shared)
        doubled = R.add(x, x)
        z = R.call_tir_inplace(cls.increment, (y,), ...)

Ops make new values, but later passes and TVM give some of them the memory of their operand: reshapes, permutations that
cancel, whatever does nothing after all; and constants stay constants. (Transfers to the device where a value is become
copies in RealizeVDevice, if the module writes in place.) If
one of two such values is overwritten while the other is still needed, by the caller of the function too, the second is
copied. Values that are one tensor by the program itself (a name, a field, a branch of `If`, `memory.view`, a parameter)
stay one: who writes to a parameter directly writes to what the caller gave.

Passes move ops inside a block, since values do not change. A kernel in place gets a block of its own where an op before
it reads what it overwrites.

Assumes A-normal form. Modules that write nothing in place, and those of kernels alone, are returned as they are; a
second run changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tvm
from tvm import relax

from ...op.cached_attention import CACHED_ATTENTION
from ...op.copies import COPY, copy
from ...op.traits import ops_where
from ..dispatch.form_dispatches import is_formed
from ..ir.blocks import used_vars, with_split_blocks
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.op_names import CALL_TIR_INPLACE, IN_PLACE
from ..ir.rewriting import (
    is_tensor_constant,
    map_bindings,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
    with_body,
    with_functions,
)
from ..ir.tensor_aliases import NOTHING, Roots, TensorAliases, flattened, merged
from ..partition.written_arguments import inplace_operands, overwritten, written_arguments
from ..record.donated import donated


def isolate_writes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if is_lowered(mod) or not any(
        op_name(b.value) in IN_PLACE for _, f in relax_functions(mod) for b in walk_bindings(f)
    ):
        return mod
    if is_formed(mod):
        return mod
    writers = {name for name, numbers in written_arguments(mod).items() if numbers}
    return with_functions(mod, {gv: _Isolated(func, writers).function() for gv, func in relax_functions(mod)})


IsolateWrites = declare_pass("IsolateWrites", isolate_writes)

_MAY_RETURN_OPERAND = ops_where(lambda traits: traits.may_return_operand)
"""Ops whose result may be their operand, where they turn out to move nothing."""
_CALLEES = ("relax.call_pure_packed", "relax.call_builtin_with_ctx", "relax.call_py_func", "relax.invoke_pure_closure")
"""Ops of functions that may return an argument."""
_NAMES = ("relax.memory.view", "relax.memory.ensure_zero_offset")
_SOLID = (*IN_PLACE, *_CALLEES, "relax.call_dps_packed", COPY, *_NAMES)
"""Ops that stay where they are among others."""
_AFTER_ALL = math.inf


@dataclass
class _Tensor:
    """A tensor of the function, by number.

    Attributes
    ----------
    is_given : bool
        Whether it outlives the work here, as arguments do.
    is_constant : bool
        Whether it may be computed when the module is compiled.
    shares : frozenset of int
        The tensors whose memory it may have.
    made : float
        Position of its binding.
    read : list of float
        Positions of what reads it.
    """

    is_given: bool = False
    is_constant: bool = False
    shares: frozenset[int] = NOTHING
    made: float = -1
    read: list[float] = field(default_factory=list)


@dataclass
class _Block:
    is_dataflow: bool


@dataclass
class _Write:
    """A binding that writes to tensors; `around` has the bindings that it stands in, itself last, and their blocks."""

    position: int
    binding: relax.Binding
    tensors: frozenset[int]
    around: list[tuple[_Block, relax.Var]]


class _Isolated:
    """A function: which tensors its variables show, what is written, and where copies and cuts are due."""

    def __init__(self, func: relax.Function, writers: set[str]) -> None:
        self.func, self.writers = func, writers
        self.aliases = TensorAliases()
        self.tensors: list[_Tensor] = []
        self.writes: list[_Write] = []
        self.made: dict[relax.Var, list[int]] = {}  # new tensors of a binding that may need a copy
        # Position of a reader that passes may move inside its block -> the block, and whether any pass does, not
        # fusion alone, which works on dataflow.
        self.movable: dict[float, tuple[_Block, bool]] = {}
        self.around: list[tuple[_Block, relax.Var]] = []
        self.position = 0
        free = set(donated(func))
        for param in func.params:
            self.aliases.bind(param, self._new(param.ty, is_given=param not in free))
        self._read(_AFTER_ALL, self._sequence(func.body))

    def function(self) -> relax.Function:
        """The function with copies and cuts."""
        if not self.writes:
            return self.func
        copied = {var for var, numbers in self.made.items() if any(self._needs_copy(number) for number in numbers)}
        for var in copied:
            for number in self.made[var]:
                self.tensors[number].shares = NOTHING
        cut = {var for write in self.writes for var in self._raced(write)}
        inline = {w.binding.var for w in self.writes if _inline_constants(w.binding.value)}
        if not (copied or cut or inline):
            return self.func
        func = map_bindings(self.func, _Writer(copied, inline).binding)
        return with_body(func, with_split_blocks(func.body, cut))

    # What the function does.

    def _sequence(self, expr: relax.Expr) -> Roots:
        if not isinstance(expr, relax.SeqExpr):
            return self.aliases.of(expr)
        for each in expr.blocks:
            block = _Block(isinstance(each, relax.DataflowBlock))
            for binding in each.bindings:
                self.position += 1
                self.around.append((block, binding.var))
                self.aliases.bind(binding.var, self._binding(binding))
                self.around.pop()
        return self.aliases.of(expr.body)

    def _binding(self, binding: relax.Binding) -> Roots:
        value = binding.value
        if isinstance(value, relax.If):
            return merged([self._sequence(value.true_branch), self._sequence(value.false_branch)])
        if isinstance(value, relax.Function):
            for param in value.params:
                self.aliases.bind(param, self._new(param.ty, is_given=True))
            self._read(_AFTER_ALL, self._sequence(value.body))
            return NOTHING
        if is_tensor_constant(value):
            return self._candidate(binding.var, is_constant=True)
        name = op_name(value)
        if not isinstance(value, relax.Call) or name in _NAMES:
            return self.aliases.of(value.args[0] if isinstance(value, relax.Call) else value)
        return self._call(binding, value, name)

    def _call(self, binding: relax.Binding, call: relax.Call, name: str | None) -> Roots:
        operands = frozenset(number for var in used_vars(call) for number in flattened(self.aliases.of(var)))
        position = self.position
        for number in operands:
            self.tensors[number].read.append(position)
        if name not in _SOLID and isinstance(call.op, tvm.ir.Op):
            self.movable[position] = self.around[-1][0], name != "relax.call_tir"
        overwrites = overwritten(call, self.writers)
        if overwrites or _inline_constants(call):
            written = frozenset(number for var in overwrites for number in flattened(self.aliases.of(var)))
            self.writes.append(_Write(position, binding, written, list(self.around)))
            return self._overwritten(binding, call, name, overwrites)
        if name in _CALLEES or not isinstance(call.op, tvm.ir.Op):
            return self._candidate(binding.var, shares=operands)
        known = all(self.tensors[number].is_constant for number in operands)
        is_constant = known and name not in _SOLID and not str(name).startswith(("relax.builtin.", "relax.vm."))
        if name in _MAY_RETURN_OPERAND:
            return self._candidate(binding.var, shares=operands, is_constant=is_constant)
        return self._candidate(binding.var, is_constant=is_constant)

    def _overwritten(
        self, binding: relax.Binding, call: relax.Call, name: str | None, overwrites: list[relax.Var]
    ) -> Roots:
        """Aliases of a call that writes: the operands that it writes to, wherever these may be in its result."""
        if name not in (CALL_TIR_INPLACE, CACHED_ATTENTION) or not isinstance(binding.var.ty, tvm.ir.TupleType):
            either_of = frozenset(number for var in overwrites for number in flattened(self.aliases.of(var)))
            fresh = NOTHING if name in IN_PLACE else frozenset(flattened(self._new(binding.var.ty)))
            return either_of | fresh
        operands, places = inplace_operands(call)
        types = binding.var.ty.fields
        return tuple(
            self._new(ty) if place < 0 else self.aliases.of(operands[place])
            for ty, place in zip(types, places, strict=True)
        )

    def _candidate(self, var: relax.Var, shares: frozenset[int] = NOTHING, is_constant: bool = False) -> Roots:
        shown = self._new(var.ty, shares=shares, is_constant=is_constant)
        self.made[var] = list(flattened(shown))
        return shown

    def _new(
        self, ty: tvm.ir.Type, is_given: bool = False, shares: frozenset[int] = NOTHING, is_constant: bool = False
    ) -> Roots:
        if isinstance(ty, tvm.ir.TupleType):
            return tuple(self._new(part, is_given, shares, is_constant) for part in ty.fields)
        self.tensors.append(_Tensor(is_given, is_constant, shares, self.position))
        return frozenset([len(self.tensors) - 1])

    def _read(self, position: float, shown: Roots) -> None:
        for number in flattened(shown):
            self.tensors[number].read.append(position)

    # What has to change.

    def _needs_copy(self, number: int) -> bool:
        """Return whether a tensor and those whose memory it may have are overwritten, one while the other is needed."""
        tensor = self.tensors[number]
        below = self._reached([number], downwards=True)
        if tensor.is_constant and any(write.tensors & below for write in self.writes):
            return True
        if not tensor.shares:
            return False
        whole = self._reached(below, downwards=False)
        whole = self._reached(whole, downwards=True) | whole
        others = whole - below
        for write in self.writes:
            if write.position <= tensor.made:
                continue
            if write.tensors & below and self._is_needed(others, write.position, given=True):
                return True
            if write.tensors & others and self._is_needed(below, write.position, given=False):
                return True
        return False

    def _is_needed(self, numbers: Iterable[int], position: float, given: bool) -> bool:
        return any(
            (given and (self.tensors[n].is_given or self.tensors[n].is_constant))
            or any(at > position for at in self.tensors[n].read)
            for n in numbers
        )

    def _reached(self, numbers: Iterable[int], downwards: bool) -> set[int]:
        """These and the tensors that may have their memory (or whose memory they may have), directly or not."""
        found = set(numbers)
        pending = list(found)
        while pending:
            number = pending.pop()
            if downwards:
                near = [n for n, tensor in enumerate(self.tensors) if number in tensor.shares]
            else:
                near = list(self.tensors[number].shares)
            pending += [n for n in near if n not in found]
            found.update(near)
        return found

    def _raced(self, write: _Write) -> Iterator[relax.Var]:
        """Bindings in which a write stands and before which an op of their block reads what it overwrites."""
        above = self._reached(write.tensors, downwards=False)
        makers = {self.tensors[number].made for number in above}
        shared = self._reached(above, downwards=True)
        readers = {at for number in shared for at in self.tensors[number].read if at < write.position} - makers
        for block, var in write.around:
            near = [self.movable[at] for at in readers if at in self.movable]
            if any(its is block and (by_any or block.is_dataflow) for its, by_any in near):
                yield var


def _inline_constants(call: relax.Expr) -> list[int]:
    """The operands that a kernel in place is given as written-out constants, and overwrites."""
    if op_name(call) != CALL_TIR_INPLACE or not isinstance(call.args[1], relax.Tuple):
        return []
    places = [int(place) for place in call.attrs.inplace_indices if int(place) >= 0]
    return [place for place in places if is_tensor_constant(call.args[1].fields[place])]


class _Writer:
    """Writes bindings, some followed by copies."""

    def __init__(self, copied: set[relax.Var], inline: set[relax.Var]) -> None:
        self.copied, self.inline = copied, inline

    def binding(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """The bindings that replace one."""
        var = binding.var
        if var in self.inline:
            return list(self._with_variables(binding))
        if var in self.copied:
            shared = type(var)(f"{var.name}_shared", var.ty)
            return [relax.VarBinding(shared, binding.value, binding.span), *_copies(var, shared)]
        return binding

    def _with_variables(self, binding: relax.Binding) -> Iterator[relax.Binding]:
        call = binding.value
        fields = list(call.args[1].fields)
        for place in _inline_constants(call):
            kind = type(binding.var)
            shared, own = (kind(f"{binding.var.name}_{what}", fields[place].ty) for what in ("constant", "own"))
            yield relax.VarBinding(shared, fields[place])
            yield from _copies(own, shared)
            fields[place] = own
        args = [call.args[0], typed(relax.Tuple(fields), call.args[1].ty), *call.args[2:]]
        new = relax.Call(call.op, args, call.attrs, call.ty_args, call.span, ret_ty=call.ty)
        yield relax.VarBinding(binding.var, new, binding.span)


def _copies(var: relax.Var, shared: relax.Var) -> Iterator[relax.Binding]:
    """Bindings that make `var` a copy of `shared`, tensor by tensor."""
    if isinstance(var.ty, relax.TensorType):
        yield relax.VarBinding(var, typed(copy(shared), var.ty))
    elif isinstance(var.ty, tvm.ir.TupleType):
        kind = relax.DataflowVar if isinstance(var, relax.DataflowVar) else relax.Var
        parts = []
        for index, ty in enumerate(var.ty.fields):
            field_, own = kind(f"{shared.name}_{index}", ty), kind(f"{var.name}_{index}", ty)
            yield relax.VarBinding(field_, typed(relax.TupleGetItem(shared, index), ty))
            yield from _copies(own, field_)
            parts.append(own)
        yield relax.VarBinding(var, typed(relax.Tuple(parts), var.ty))
    else:
        yield relax.VarBinding(var, shared)
