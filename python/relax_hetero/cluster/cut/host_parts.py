"""The part of a function for one host, read as a list of work: tuples opened, sends and receives taken out."""

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
    """Work of one host for a function. Every variable is a tensor, a shape, a number or an object.

    Attributes
    ----------
    params : dict of relax.Var to int
        The leaves of the function's parameters, with their numbers, which are those of the whole function.
    bindings : list of relax.Binding
        In order. `free` ones only name sizes by others, and every step that needs them repeats them.
    receives : dict of relax.Var to int
        Channels that bring variables.
    sends : dict of int to relax.Var
        Variables that channels take.
    finds : dict of relax.Var to relax.Var
        Symbolic sizes that a binding finds, with the variable of a shape that holds them.
    result : relax.Expr
        A tuple of variables and constants, or one.
    in_order : bool
        Whether bindings have effects, so that none may pass another.
    """

    host: str
    params: dict[relax.Var, int] = field(default_factory=dict)
    bindings: list[relax.Binding] = field(default_factory=list)
    free: set[relax.Var] = field(default_factory=set)
    receives: dict[relax.Var, int] = field(default_factory=dict)
    sends: dict[int, relax.Var] = field(default_factory=dict)
    finds: dict[relax.Var, relax.Var] = field(default_factory=dict)
    result: relax.Expr = None
    in_order: bool = False

    def reads(self, binding: relax.Binding) -> Iterator[relax.Var]:
        """The variables that a binding needs, those that hold the sizes in it included."""
        yield from used_vars(binding.value)
        for symbol in (*symbols_in(binding.value), *symbols_in(binding.var.ty)):
            held = self.finds.get(symbol)
            if held is not None and not held.same_as(binding.var) and symbol not in self._available_before(binding):
                yield held
            elif symbol in self.free:
                yield symbol

    def add(self, value: relax.Expr, name: str) -> relax.Var:
        """Bind a value behind all others."""
        var = relax.Var(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def variable_of(self, value: relax.Expr) -> relax.Var:
        """The variable of a result: one that is work, or that enters the part; a size gets one."""
        if not isinstance(value, relax.Var) or not self._has(value):
            return self.add(value, "result")
        self.free.discard(value)
        return value

    def _has(self, var: relax.Var) -> bool:
        return var in self.params or var in self.receives or any(b.var.same_as(var) for b in self.bindings)

    def keep(self, var: relax.Var, own: relax.Var) -> None:
        """Use the host's own `own`, or a copy on another device of the host, in place of what arrives as `var`."""
        del self.receives[var]
        device = getattr(var.ty, "vdevice", None)
        if same_vdevice(device, getattr(own.ty, "vdevice", None)):
            names: dict[relax.Var, relax.Expr] = {var: own}
            self.bindings = [renamed(binding, names) for binding in self.bindings]
            self.sends = {channel: own if sent.same_as(var) else sent for channel, sent in self.sends.items()}
            self.result = structural_map(self.result, (relax.Var, lambda each: names.get(each, each)))
        else:
            before = [index for index, binding in enumerate(self.bindings, 1) if binding.var.same_as(own)]
            copy = typed(relax.op.to_vdevice(own, device), var.ty)
            self.bindings.insert(max(before, default=0), relax.VarBinding(var, copy))

    def _available_before(self, binding: relax.Binding) -> Sequence[relax.Var]:
        return symbols_in(binding.ty) if isinstance(binding, relax.MatchCast) else ()


def read_part(mod: tvm.IRModule, host: str, func: relax.Function) -> HostPart:
    """The part of a function for a host, as `PartitionByHost` made it."""
    return _Reader(mod, host).read(func)


def exchanges_inside(mod: tvm.IRModule, func: relax.Function) -> bool:
    """Return whether a part sends or receives inside of a branch, or in a function that it calls."""
    outer = {binding.var for binding in walk_bindings(func.body, nested=False)}
    if any(_exchange(b.value) is not None and b.var not in outer for b in walk_bindings(func.body)):
        return True
    seen: set[tvm.ir.GlobalVar] = set()
    pending = [func]
    while pending:
        for binding in walk_bindings(pending.pop().body):
            for gv in global_vars_in(binding.value):
                callee = mod.functions.get(gv)
                if gv in seen or not isinstance(callee, relax.Function):
                    continue
                if any(_exchange(inner.value) is not None for inner in walk_bindings(callee.body)):
                    return True  # also where the part calls itself
                seen.add(gv)
                pending.append(callee)
    return False


class _Reader:
    def __init__(self, mod: tvm.IRModule, host: str) -> None:
        self._mod, self._part = mod, HostPart(host)
        self._names: dict[relax.Var, relax.Expr] = {}
        self._known: set[relax.Var] = set()

    def read(self, func: relax.Function) -> HostPart:
        part = self._part
        self._known = {symbol for param in func.params for symbol in symbols_in(param.ty)}
        for param in func.params[1:] if SIZES_FIRST in func.attrs else func.params:
            self._open(param, lambda var: part.params.setdefault(var, len(part.params)), lambda var, index: None)
        bindings = list(walk_bindings(func.body, nested=False))
        required = requirement_positions(bindings)
        for position, binding in enumerate(bindings):
            self._read(renamed(binding, self._names), position in required)
        part.result = self._renamed(func.body.body)
        return part

    def _read(self, binding: relax.Binding, is_required: bool) -> None:
        part, var, value = self._part, binding.var, binding.value
        exchange = _exchange(value)
        if exchange == SEND:
            value = value.args[0]
            part.sends[int(_number(binding.value.args[2]))] = (
                value if isinstance(value, relax.Var) else part.add(value, "sent")
            )
        elif exchange == RECEIVE:
            part.receives[var] = int(_number(value.args[1]))
        elif is_required:
            part.bindings.append(binding)
        elif isinstance(binding, relax.MatchCast):
            self._match(binding)
        elif isinstance(value, (relax.Tuple, relax.Var)):
            self._names[var] = value
        elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            self._names[var] = value.tuple_value.fields[int(value.index)]
        else:
            self._work(binding)

    def _work(self, binding: relax.Binding) -> None:
        part, var, value = self._part, binding.var, binding.value
        part.bindings.append(binding)
        if not isinstance(value, (relax.Call, relax.If)) and not is_tensor_constant(value):
            part.free.add(var)
        part.in_order = part.in_order or _has_effect(self._mod, value)
        self._open(var, lambda leaf: None, self._item)

    def _match(self, binding: relax.MatchCast) -> None:
        """A cast, and behind it a shape of the sizes that it finds, for other steps."""
        part = self._part
        part.bindings.append(binding)
        found = [symbol for symbol in symbols_in(binding.ty) if symbol not in self._known]
        if found:
            self._known |= set(found)
            part.finds |= dict.fromkeys(found, part.add(relax.ShapeExpr(found), "sizes"))

    def _item(self, item: relax.Var, got: relax.Expr) -> None:
        self._part.bindings.append(relax.VarBinding(item, got))

    def _open(
        self, var: relax.Var, leaf: Callable[[relax.Var], object], item: Callable[[relax.Var, relax.Expr], object]
    ) -> relax.Expr:
        """Give the fields of a tuple names of their own: `item` is told of each, `leaf` of those that are no tuples."""
        if not isinstance(var.ty, tvm.ir.TupleType):
            leaf(var)
            return var
        fields = []
        for index, ty in enumerate(var.ty.fields):
            field_var = relax.Var(f"{var.name}_{index}", ty)
            item(field_var, relax.TupleGetItem(var, index))
            fields.append(self._open(field_var, leaf, item))
        self._names[var] = relax.Tuple(fields)
        return self._names[var]

    def _renamed(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._renamed(each) for each in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            whole = self._renamed(expr.tuple_value)
            return whole.fields[int(expr.index)] if isinstance(whole, relax.Tuple) else expr
        return self._names.get(expr, expr) if isinstance(expr, relax.Var) else expr


def _exchange(value: relax.Expr) -> str | None:
    """`SEND` or `RECEIVE` where a value is one of them."""
    if isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc):
        name = str(value.op.global_symbol)
        return name if name in (SEND, RECEIVE) else None
    return None


def _number(expr: relax.Expr) -> int:
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
