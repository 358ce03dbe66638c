"""One host's part of a function as a list of bindings: tuples are flattened, sends and receives taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ...target.vdevice import same_vdevice
from ...transform.ir.blocks import renamed, used_vars
from ...transform.ir.op_names import IN_PLACE
from ...transform.ir.requirements import requirement_positions, symbols_in
from ...transform.ir.rewriting import global_vars_in, is_tensor_constant, op_name, typed, walk_bindings
from ...transform.partition.host_needs import has_effect
from ...transform.partition.partition_by_host import RECEIVE, SEND, SIZES_FIRST


@dataclass
class HostPart:
    """One host's part of a function. No variable is a tuple."""

    host: str  # logical name of the host
    # Leaves of the function's parameters, and their indices in the function.
    params: dict[relax.Var, int] = field(default_factory=dict)
    bindings: list[relax.Binding] = field(default_factory=list)  # bindings in order
    # Variables of bindings that only compute sizes from sizes; steps that need them repeat them.
    free: set[relax.Var] = field(default_factory=set)
    receives: dict[relax.Var, int] = field(default_factory=dict)  # channels of variables that are received
    sends: dict[int, relax.Var] = field(default_factory=dict)  # variables that are sent, by channel
    # For each symbolic size that a `match_cast` defines, the variable of a shape that holds it.
    size_shapes: dict[relax.Var, relax.Var] = field(default_factory=dict)
    result: relax.Expr = None  # variable or constant, or nested tuples of them
    in_order: bool = False  # whether bindings have side effects, so that they must stay in order

    def reads(self, binding: relax.Binding) -> Iterator[relax.Var]:
        """Variables that a binding needs, including those of its symbolic sizes."""
        yield from used_vars(binding.value)
        for symbol in (*symbols_in(binding.value), *symbols_in(binding.var.ty)):
            shape = self.size_shapes.get(symbol)
            if shape is not None and not shape.same_as(binding.var) and symbol not in self._defined_symbols(binding):
                yield shape
            elif symbol in self.free:
                yield symbol

    def add(self, value: relax.Expr, name: str) -> relax.Var:
        """Append a binding of a value."""
        var = relax.Var(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def variable_of(self, value: relax.Expr) -> relax.Var:
        """Variable of a result; a value without a variable gets one."""
        if not isinstance(value, relax.Var) or not self._has(value):
            return self.add(value, "result")
        self.free.discard(value)
        return value

    def _has(self, var: relax.Var) -> bool:
        return var in self.params or var in self.receives or any(b.var.same_as(var) for b in self.bindings)

    def keep(self, var: relax.Var, own: relax.Var) -> None:
        """Replace the received `var` by the host's variable `own`, or by a copy on the right device of the host."""
        del self.receives[var]
        device = getattr(var.ty, "vdevice", None)
        if same_vdevice(device, getattr(own.ty, "vdevice", None)):
            names: dict[relax.Var, relax.Expr] = {var: own}
            self.bindings = [renamed(binding, names) for binding in self.bindings]
            self.sends = {channel: own if value.same_as(var) else value for channel, value in self.sends.items()}
            self.result = structural_map(self.result, (relax.Var, lambda each: names.get(each, each)))
        else:
            positions = [index for index, binding in enumerate(self.bindings, 1) if binding.var.same_as(own)]
            copy = typed(relax.op.to_vdevice(own, device), var.ty)
            self.bindings.insert(max(positions, default=0), relax.VarBinding(var, copy))

    def _defined_symbols(self, binding: relax.Binding) -> Sequence[relax.Var]:
        return symbols_in(binding.ty) if isinstance(binding, relax.MatchCast) else ()


def read_part(mod: tvm.IRModule, host: str, func: relax.Function) -> HostPart:
    """Read a function that `PartitionByHost` made."""
    return _Reader(mod, host).read(func)


def exchanges_inside(mod: tvm.IRModule, func: relax.Function) -> bool:
    """Return whether a part sends or receives inside of a branch, or in a function that it calls."""
    top_level = {binding.var for binding in walk_bindings(func.body, nested=False)}
    if any(_exchange(b.value) is not None and b.var not in top_level for b in walk_bindings(func.body)):
        return True
    visited: set[tvm.ir.GlobalVar] = set()
    pending = [func]
    while pending:
        for binding in walk_bindings(pending.pop().body):
            for gv in global_vars_in(binding.value):
                callee = mod.functions.get(gv)
                if gv in visited or not isinstance(callee, relax.Function):
                    continue
                if any(_exchange(inner.value) is not None for inner in walk_bindings(callee.body)):
                    return True  # also if the part calls itself
                visited.add(gv)
                pending.append(callee)
    return False


class _Reader:
    def __init__(self, mod: tvm.IRModule, host: str) -> None:
        self._mod, self._part = mod, HostPart(host)
        self._names: dict[relax.Var, relax.Expr] = {}
        self._defined_sizes: set[relax.Var] = set()

    def read(self, func: relax.Function) -> HostPart:
        part = self._part
        self._defined_sizes = {symbol for param in func.params for symbol in symbols_in(param.ty)}
        for param in func.params[1:] if SIZES_FIRST in func.attrs else func.params:
            self._flatten(param, lambda var: part.params.setdefault(var, len(part.params)), lambda var, index: None)
        bindings = list(walk_bindings(func.body, nested=False))
        required = requirement_positions(bindings)
        for position, binding in enumerate(bindings):
            self._read_binding(renamed(binding, self._names), position in required)
        part.result = self._replace_names(func.body.body)
        return part

    def _read_binding(self, binding: relax.Binding, is_required: bool) -> None:
        part, var, value = self._part, binding.var, binding.value
        exchange = _exchange(value)
        if exchange == SEND:
            value = value.args[0]
            part.sends[int(_as_int(binding.value.args[2]))] = (
                value if isinstance(value, relax.Var) else part.add(value, "sent")
            )
        elif exchange == RECEIVE:
            part.receives[var] = int(_as_int(value.args[1]))
        elif is_required:
            part.bindings.append(binding)
        elif isinstance(binding, relax.MatchCast):
            self._match(binding)
        elif isinstance(value, (relax.Tuple, relax.Var)):
            self._names[var] = value
        elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            self._names[var] = value.tuple_value.fields[int(value.index)]
        else:
            self._add_work(binding)

    def _add_work(self, binding: relax.Binding) -> None:
        part, var, value = self._part, binding.var, binding.value
        part.bindings.append(binding)
        if not isinstance(value, (relax.Call, relax.If)) and not is_tensor_constant(value):
            part.free.add(var)
        part.in_order = part.in_order or _has_effect(self._mod, value)
        self._flatten(var, lambda leaf: None, self._bind_item)

    def _match(self, binding: relax.MatchCast) -> None:
        """Add a cast, and a shape of the sizes that it defines, for other steps."""
        part = self._part
        part.bindings.append(binding)
        symbols = [symbol for symbol in symbols_in(binding.ty) if symbol not in self._defined_sizes]
        if symbols:
            self._defined_sizes |= set(symbols)
            part.size_shapes |= dict.fromkeys(symbols, part.add(relax.ShapeExpr(symbols), "sizes"))

    def _bind_item(self, item: relax.Var, got: relax.Expr) -> None:
        self._part.bindings.append(relax.VarBinding(item, got))

    def _flatten(
        self, var: relax.Var, leaf: Callable[[relax.Var], object], item: Callable[[relax.Var, relax.Expr], object]
    ) -> relax.Expr:
        """Give the fields of a tuple variables of their own; calls `item` for each, and `leaf` for those not tuples."""
        if not isinstance(var.ty, tvm.ir.TupleType):
            leaf(var)
            return var
        fields = []
        for index, ty in enumerate(var.ty.fields):
            field_var = relax.Var(f"{var.name}_{index}", ty)
            item(field_var, relax.TupleGetItem(var, index))
            fields.append(self._flatten(field_var, leaf, item))
        self._names[var] = relax.Tuple(fields)
        return self._names[var]

    def _replace_names(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._replace_names(each) for each in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            value = self._replace_names(expr.tuple_value)
            return value.fields[int(expr.index)] if isinstance(value, relax.Tuple) else expr
        return self._names.get(expr, expr) if isinstance(expr, relax.Var) else expr


def _exchange(value: relax.Expr) -> str | None:
    """Return `SEND` or `RECEIVE` if a value is a call of one of them."""
    if isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc):
        name = str(value.op.global_symbol)
        return name if name in (SEND, RECEIVE) else None
    return None


def _as_int(expr: relax.Expr) -> int:
    return int(getattr(expr, "value", expr))


def _has_effect(mod: tvm.IRModule, value: relax.Expr) -> bool:
    if isinstance(value, relax.If):
        inner = (*walk_bindings(value.true_branch), *walk_bindings(value.false_branch))
        return any(_has_effect(mod, binding.value) for binding in inner)
    if not isinstance(value, relax.Call):
        return False
    if isinstance(value.op, tvm.ir.GlobalVar):
        callee = mod.functions.get(value.op)
        return isinstance(callee, relax.Function) and not callee.is_pure
    return has_effect(value) or op_name(value) in IN_PLACE
