"""IsolateWrites: give in-place kernels their own tensors to overwrite, and keep readers before them.

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

Ops produce new values, but later passes and TVM may give a result the memory of its operand: for reshapes, permutations
that cancel, and other ops that turn out to change nothing; and constants are shared. (Transfers within a device become
copies in RealizeVDevice, if the module writes in place.) If one of two such values is overwritten while the other is
still needed, also by the caller of the function, the second is copied. Values that are the same tensor in the program
(an alias, a field, a branch of `If`, `memory.view`, a parameter) are not copied: a write to a parameter writes to the
caller's tensor.

Passes reorder ops inside a block, since values do not change. Therefore an in-place kernel gets a separate block if an
op before it reads a tensor that it overwrites.

Assumes A-normal form. Modules without in-place writes, and modules after FormDispatches, are not changed; a second run
changes nothing.
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
    with_args,
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
"""Ops whose result may be their operand, if they turn out to change nothing."""
_CALLEES = ("relax.call_pure_packed", "relax.call_builtin_with_ctx", "relax.call_py_func", "relax.invoke_pure_closure")
"""Calls of functions that may return an argument."""
_ALIASES = ("relax.memory.view", "relax.memory.ensure_zero_offset")
_NOT_REORDERED = (*IN_PLACE, *_CALLEES, "relax.call_dps_packed", COPY, *_ALIASES)  # ops that passes do not reorder
_AT_RETURN = math.inf  # position of reads by the caller, after all bindings


@dataclass
class _Tensor:
    """A tensor of the function; tensors are referred to by index."""

    is_argument: bool = False  # whether it belongs to the caller, which may read it later
    is_constant: bool = False  # whether it may be computed when the module is compiled
    shares: frozenset[int] = NOTHING  # tensors whose memory it may share
    views: set[int] = field(default_factory=set)  # tensors that may share its memory
    definition: float = -1  # position of its binding
    reads: list[float] = field(default_factory=list)  # positions of its readers


@dataclass
class _Block:
    is_dataflow: bool


@dataclass
class _Write:
    """A binding that writes to tensors; `enclosing` has the bindings around it, itself last, with their blocks."""

    position: int
    binding: relax.Binding
    tensors: frozenset[int]
    enclosing: list[tuple[_Block, relax.Var]]


class _Isolated:
    """Analysis of a function: tensors of its variables, writes, and the required copies and splits of blocks."""

    def __init__(self, func: relax.Function, writers: set[str]) -> None:
        self.func, self.writers = func, writers
        self.aliases = TensorAliases()
        self.tensors: list[_Tensor] = []
        self.writes: list[_Write] = []
        self.candidates: dict[relax.Var, list[int]] = {}  # new tensors of a binding that may need a copy
        # Block of a reader that passes may reorder, by its position, and whether passes other than fusion do: fusion
        # only works on dataflow blocks.
        self.movable: dict[float, tuple[_Block, bool]] = {}
        self.enclosing: list[tuple[_Block, relax.Var]] = []
        self.position = 0
        free = set(donated(func))
        for param in func.params:
            self.aliases.bind(param, self._new(param.ty, is_argument=param not in free))
        self._read(_AT_RETURN, self._sequence(func.body))

    def function(self) -> relax.Function:
        """The function with copies and split blocks."""
        if not self.writes:
            return self.func
        copied = {var for var, tensors in self.candidates.items() if any(map(self._needs_copy, tensors))}
        for var in copied:
            for tensor in self.candidates[var]:
                for source in self.tensors[tensor].shares:
                    self.tensors[source].views.discard(tensor)
                self.tensors[tensor].shares = NOTHING
        split = {var for write in self.writes for var in self._split_points(write)}
        inline = {w.binding.var for w in self.writes if _inline_constants(w.binding.value)}
        if not (copied or split or inline):
            return self.func
        func = map_bindings(self.func, _Writer(copied, inline).binding)
        return with_body(func, with_split_blocks(func.body, split))

    # Analysis.

    def _sequence(self, expr: relax.Expr) -> Roots:
        if not isinstance(expr, relax.SeqExpr):
            return self.aliases.of(expr)
        for binding_block in expr.blocks:
            block = _Block(isinstance(binding_block, relax.DataflowBlock))
            for binding in binding_block.bindings:
                self.position += 1
                self.enclosing.append((block, binding.var))
                self.aliases.bind(binding.var, self._binding(binding))
                self.enclosing.pop()
        return self.aliases.of(expr.body)

    def _binding(self, binding: relax.Binding) -> Roots:
        value = binding.value
        if isinstance(value, relax.If):
            return merged([self._sequence(value.true_branch), self._sequence(value.false_branch)])
        if isinstance(value, relax.Function):
            for param in value.params:
                self.aliases.bind(param, self._new(param.ty, is_argument=True))
            self._read(_AT_RETURN, self._sequence(value.body))
            return NOTHING
        if is_tensor_constant(value):
            return self._candidate(binding.var, is_constant=True)
        name = op_name(value)
        if not isinstance(value, relax.Call) or name in _ALIASES:
            return self.aliases.of(value.args[0] if isinstance(value, relax.Call) else value)
        return self._call(binding, value, name)

    def _call(self, binding: relax.Binding, call: relax.Call, name: str | None) -> Roots:
        operands = frozenset(tensor for var in used_vars(call) for tensor in flattened(self.aliases.of(var)))
        position = self.position
        for tensor in operands:
            self.tensors[tensor].reads.append(position)
        if name not in _NOT_REORDERED and isinstance(call.op, tvm.ir.Op):
            self.movable[position] = self.enclosing[-1][0], name != "relax.call_tir"
        overwrites = overwritten(call, self.writers)
        if overwrites or _inline_constants(call):
            written = frozenset(tensor for var in overwrites for tensor in flattened(self.aliases.of(var)))
            self.writes.append(_Write(position, binding, written, list(self.enclosing)))
            return self._overwritten(binding, call, name, overwrites)
        if name in _CALLEES or not isinstance(call.op, tvm.ir.Op):
            return self._candidate(binding.var, shares=operands)
        has_constants = all(self.tensors[tensor].is_constant for tensor in operands)
        is_constant = (
            has_constants and name not in _NOT_REORDERED and not str(name).startswith(("relax.builtin.", "relax.vm."))
        )
        if name in _MAY_RETURN_OPERAND:
            return self._candidate(binding.var, shares=operands, is_constant=is_constant)
        return self._candidate(binding.var, is_constant=is_constant)

    def _overwritten(
        self, binding: relax.Binding, call: relax.Call, name: str | None, overwrites: list[relax.Var]
    ) -> Roots:
        """Tensors of the result of a call that writes: the overwritten operands, and new tensors."""
        if name not in (CALL_TIR_INPLACE, CACHED_ATTENTION) or not isinstance(binding.var.ty, tvm.ir.TupleType):
            written = frozenset(tensor for var in overwrites for tensor in flattened(self.aliases.of(var)))
            new = NOTHING if name in IN_PLACE else frozenset(flattened(self._new(binding.var.ty)))
            return written | new
        operands, indices = inplace_operands(call)
        types = binding.var.ty.fields
        return tuple(
            self._new(ty) if index < 0 else self.aliases.of(operands[index])
            for ty, index in zip(types, indices, strict=True)
        )

    def _candidate(self, var: relax.Var, shares: frozenset[int] = NOTHING, is_constant: bool = False) -> Roots:
        roots = self._new(var.ty, shares=shares, is_constant=is_constant)
        self.candidates[var] = list(flattened(roots))
        return roots

    def _new(
        self, ty: tvm.ir.Type, is_argument: bool = False, shares: frozenset[int] = NOTHING, is_constant: bool = False
    ) -> Roots:
        if isinstance(ty, tvm.ir.TupleType):
            return tuple(self._new(field_ty, is_argument, shares, is_constant) for field_ty in ty.fields)
        index = len(self.tensors)
        self.tensors.append(_Tensor(is_argument, is_constant, shares, definition=self.position))
        for source in shares:
            self.tensors[source].views.add(index)
        return frozenset([index])

    def _read(self, position: float, roots: Roots) -> None:
        for tensor in flattened(roots):
            self.tensors[tensor].reads.append(position)

    # Required changes.

    def _needs_copy(self, index: int) -> bool:
        """Return whether of a tensor and those that share its memory, one is overwritten while another is needed."""
        tensor = self.tensors[index]
        views = self._closure([index], to_views=True)
        if tensor.is_constant and any(write.tensors & views for write in self.writes):
            return True
        if not tensor.shares:
            return False
        sources = self._closure(views, to_views=False)
        rest = (self._closure(sources, to_views=True) | sources) - views
        for write in self.writes:
            if write.position <= tensor.definition:
                continue
            if write.tensors & views and self._is_needed(rest, write.position, with_arguments=True):
                return True
            if write.tensors & rest and self._is_needed(views, write.position, with_arguments=False):
                return True
        return False

    def _is_needed(self, indices: Iterable[int], position: float, with_arguments: bool) -> bool:
        tensors = [self.tensors[index] for index in indices]
        return any(
            (with_arguments and (tensor.is_argument or tensor.is_constant))
            or any(read > position for read in tensor.reads)
            for tensor in tensors
        )

    def _closure(self, indices: Iterable[int], to_views: bool) -> set[int]:
        """Tensors with all their views (or all their sources), which may share their memory, transitively."""
        closure = set(indices)
        pending = list(closure)
        while pending:
            tensor = self.tensors[pending.pop()]
            neighbours = (tensor.views if to_views else tensor.shares) - closure
            pending += neighbours
            closure |= neighbours
        return closure

    def _split_points(self, write: _Write) -> Iterator[relax.Var]:
        """Bindings that contain a write, and need a separate block because ops before read what it overwrites."""
        sources = self._closure(write.tensors, to_views=False)
        definitions = {self.tensors[index].definition for index in sources}
        shared = self._closure(sources, to_views=True)
        reads = {read for index in shared for read in self.tensors[index].reads if read < write.position} - definitions
        for block, var in write.enclosing:
            movable = [self.movable[read] for read in reads if read in self.movable]
            if any(other is block and (by_any_pass or block.is_dataflow) for other, by_any_pass in movable):
                yield var


def _inline_constants(call: relax.Expr) -> list[int]:
    """Indices of operands of an in-place kernel that it overwrites although they are written as constants."""
    if op_name(call) != CALL_TIR_INPLACE or not isinstance(call.args[1], relax.Tuple):
        return []
    indices = [int(index) for index in call.attrs.inplace_indices if int(index) >= 0]
    return [index for index in indices if is_tensor_constant(call.args[1].fields[index])]


class _Writer:
    """Writer of bindings, some of them followed by copies."""

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
        for index in _inline_constants(call):
            kind = type(binding.var)
            source, copy_ = (kind(f"{binding.var.name}_{suffix}", fields[index].ty) for suffix in ("constant", "own"))
            yield relax.VarBinding(source, fields[index])
            yield from _copies(copy_, source)
            fields[index] = copy_
        args = [call.args[0], typed(relax.Tuple(fields), call.args[1].ty), *call.args[2:]]
        yield relax.VarBinding(binding.var, typed(with_args(call, args), call.ty), binding.span)


def _copies(var: relax.Var, shared: relax.Var) -> Iterator[relax.Binding]:
    """Bindings that make `var` a copy of `shared`, tensor by tensor."""
    if isinstance(var.ty, relax.TensorType):
        yield relax.VarBinding(var, typed(copy(shared), var.ty))
    elif isinstance(var.ty, tvm.ir.TupleType):
        kind = relax.DataflowVar if isinstance(var, relax.DataflowVar) else relax.Var
        fields = []
        for index, ty in enumerate(var.ty.fields):
            source, target = kind(f"{shared.name}_{index}", ty), kind(f"{var.name}_{index}", ty)
            yield relax.VarBinding(source, typed(relax.TupleGetItem(shared, index), ty))
            yield from _copies(target, source)
            fields.append(target)
        yield relax.VarBinding(var, typed(relax.Tuple(fields), var.ty))
    else:
        yield relax.VarBinding(var, shared)
