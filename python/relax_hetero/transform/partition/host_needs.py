"""Hosts that evaluate each binding of a function, and hosts that need its values.

A tensor is on the host of its vdevice. Values without a device are *sizes*: shapes, numbers, symbolic sizes that a
``match_cast`` defines. Code that computes sizes from sizes is evaluated on every host that needs them, since that is
cheaper than a message. Sizes that are read from a tensor are known on its host, and sent to the hosts that need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax

from ...errors import BuildError
from ...op.require import is_requirement
from ...target.hosts import host_of
from ..ir.blocks import used_vars
from ..ir.op_names import TRANSFER
from ..ir.requirements import symbols_in
from ..ir.rewriting import is_tensor_constant, op_name, tensor_types, walk_bindings

Hosts: TypeAlias = "tuple[str, ...]"
Needs: TypeAlias = "dict[str, set[relax.Var]]"  # sizes by the host that needs them


@dataclass(frozen=True)
class Evaluation:
    """Hosts of a binding."""

    hosts: Hosts  # hosts that evaluate it
    sent_to: Hosts = ()  # other hosts, which need the sizes that it defines
    sizes: tuple[relax.Var, ...] = ()  # the symbolic sizes that it defines


@dataclass
class HostNeeds:
    """Needs of the hosts of a module, function by function."""

    hosts: Hosts  # all hosts, in the order of the module's vdevices
    participants: Mapping[tvm.ir.GlobalVar, Hosts]  # the hosts of each Relax function
    evaluations: dict[relax.Var, Evaluation] = field(default_factory=dict)  # evaluations by the variable of a binding
    _defined_sizes: dict[relax.Var, tuple[relax.Var, ...]] = field(default_factory=dict)
    _working: set[str] = field(default_factory=set)
    _name: str = ""

    def add(self, gv: tvm.ir.GlobalVar, func: relax.Function) -> None:
        """Add the evaluations of a function's bindings."""
        self._name, self._working = gv.name_hint, set()
        parameter_sizes = set(parameter_symbols(func))
        self._find_sizes(func.body, set(parameter_sizes))
        hosts = self.participants[gv]
        result = set(filter(_is_size_like, used_vars(func.body.body))) | (
            set(symbols_in(func.ret_ty)) - parameter_sizes
        )
        needs: Needs = {host: set(result) for host in hosts}
        self._scan(list(walk_bindings(func.body, nested=False)), needs, parameter_sizes)

    def where(self, binding: relax.Binding) -> Hosts:
        """The hosts that must evaluate a binding; empty if the hosts that need its sizes evaluate it."""
        value = binding.value
        hosts = set(hosts_in(binding.var.ty))
        if isinstance(value, relax.Function) or _calls_closure(value):
            raise BuildError(
                f"function {self._name!r}: {binding.var.name!r} is, or calls, a function inside a function; expected "
                "a module without closures where devices are on several hosts (relax.transform.LambdaLift makes one)"
            )
        if isinstance(value, relax.If):
            for inner in (*walk_bindings(value.true_branch), *walk_bindings(value.false_branch)):
                hosts |= set(self.where(inner)) | set(hosts_in(inner.var.ty))
            for branch in (value.true_branch, value.false_branch):
                hosts |= set(hosts_in(branch.body.ty))
        elif isinstance(value, relax.Call) and value.op in self.participants:
            hosts |= set(self.participants[value.op])
        elif isinstance(value, relax.Call) and not is_requirement(value):
            hosts |= {host for arg in value.args for host in hosts_in(arg.ty)}
            if not hosts and has_effect(value):
                hosts = {self.hosts[0]}
        elif isinstance(value, relax.TupleGetItem) and not hosts:  # a size next to tensors is known on their hosts
            hosts |= set(hosts_in(value.tuple_value.ty))
        elif is_tensor_constant(value):
            hosts |= set(hosts_in(value.ty))
        return tuple(host for host in self.hosts if host in hosts)

    def _find_sizes(self, body: relax.Expr, known: set[relax.Var]) -> None:
        """Record the symbolic sizes that each ``match_cast`` defines."""
        for binding in walk_bindings(body, nested=False):
            if isinstance(binding, relax.MatchCast):
                new = tuple(symbol for symbol in symbols_in(binding.ty) if symbol not in known)
                self._defined_sizes[binding.var] = new
                known |= set(new)
            known.add(binding.var)
            if isinstance(binding.value, relax.If):
                self._find_sizes(binding.value.true_branch, set(known))
                self._find_sizes(binding.value.false_branch, set(known))

    def _scan(self, bindings: Sequence[relax.Binding], needs: Needs, known_sizes: set[relax.Var]) -> None:
        """Walk from the last binding to the first: `needs` of the code after a binding become those before it."""
        for binding in reversed(bindings):
            var, value = binding.var, binding.value
            sizes = self._defined_sizes.get(var, ())
            defined = {var, *sizes} if _is_size_like(var) else set(sizes)
            ends = crossing(binding)
            if ends is not None:
                self.evaluations[var] = Evaluation(ends)
                self._need(needs, ends, binding, known_sizes)
                continue
            hosts = self.where(binding)
            needing = tuple(host for host in needs if needs[host] & defined)
            if is_requirement(value):
                hosts = self._checked_on(value, needs, known_sizes)
            elif not hosts:
                hosts, needing = needing, ()
            elif isinstance(value, (relax.Call, relax.If)):
                self._working |= set(hosts)
            sent_to = tuple(host for host in needing if host not in hosts)
            self.evaluations[var] = Evaluation(hosts, sent_to, sizes)
            if sent_to and any(isinstance(ty, relax.ObjectType) for ty in leaves_of(var.ty)):
                raise BuildError(
                    f"function {self._name!r}: {var.name!r} is an object of host {hosts[0]!r} that host {sent_to[0]!r} "
                    "needs; expected a tensor or a shape, which can be sent"
                )
            for host in (*hosts, *sent_to):
                needs[host] -= defined
            self._need(needs, sent_to, binding, known_sizes, only_type=True)
            if isinstance(value, relax.If):
                self._scan_branches(value, hosts, needs, known_sizes)
            self._need(needs, hosts, binding, known_sizes)

    def _scan_branches(self, value: relax.If, hosts: Hosts, needs: Needs, known_sizes: set[relax.Var]) -> None:
        for branch in (value.true_branch, value.false_branch):
            result = set(filter(_is_size_like, used_vars(branch.body)))
            inside: Needs = {host: set(result) for host in hosts}
            self._scan(list(walk_bindings(branch, nested=False)), inside, known_sizes)
            for host in hosts:
                needs[host] |= inside[host]

    def _need(
        self, needs: Needs, hosts: Hosts, binding: relax.Binding, known_sizes: set[relax.Var], only_type: bool = False
    ) -> None:
        """Add the sizes in a binding to the needs of the hosts that evaluate it, or receive its result."""
        value = binding.value
        sizes = set(symbols_in(binding.var.ty))
        if not only_type and not isinstance(value, relax.If):
            sizes |= {symbol for symbol in symbols_in(value) if _is_size_like(symbol)}
            sizes |= {symbol for var in used_vars(value) for symbol in symbols_in(var.ty)}
        elif isinstance(value, relax.If):
            sizes |= set(filter(_is_size_like, used_vars(value.cond)))
        sizes -= known_sizes | {binding.var, *self._defined_sizes.get(binding.var, ())}
        for host in hosts:
            needs[host] |= sizes

    def _checked_on(self, value: relax.Call, needs: Needs, known_sizes: set[relax.Var]) -> Hosts:
        """The hosts that check a requirement: those that know its sizes and have work after it.

        If there is none, a host that knows the sizes, else the first host.
        """
        sizes = set(symbols_in(value)) - known_sizes
        knowing = tuple(host for host in needs if sizes <= needs[host])
        return tuple(host for host in knowing if host in self._working) or knowing[:1] or (next(iter(needs)),)


def participants_of(
    functions: Sequence[tuple[tvm.ir.GlobalVar, relax.Function]], hosts: Hosts
) -> dict[tvm.ir.GlobalVar, Hosts]:
    """The hosts of each function, in the order of `hosts`: those of its tensors, and of its callees."""
    hosts_by_function: dict[tvm.ir.GlobalVar, set[str]] = {}
    calls: dict[tvm.ir.GlobalVar, set[tvm.ir.GlobalVar]] = {gv: set() for gv, _ in functions}
    for gv, func in functions:
        used = {host for param in func.params for host in hosts_in(param.ty)} | set(hosts_in(func.ret_ty))
        for binding in walk_bindings(func):
            used |= set(hosts_in(binding.var.ty))
            if isinstance(binding.value, relax.Call):
                used |= {host for arg in binding.value.args for host in hosts_in(arg.ty)}
                if binding.value.op in calls:
                    calls[gv].add(binding.value.op)
        hosts_by_function[gv] = used
    changed = True
    while changed:
        changed = False
        for gv, callees in calls.items():
            new_hosts = set().union(*(hosts_by_function[callee] for callee in callees)) - hosts_by_function[gv]
            hosts_by_function[gv] |= new_hosts
            changed = changed or bool(new_hosts)
    return {gv: tuple(host for host in hosts if host in used) or hosts[:1] for gv, used in hosts_by_function.items()}


def crossing(binding: relax.Binding) -> tuple[str, str] | None:
    """Source and destination host of a transfer between hosts; None for other bindings."""
    value = binding.value
    if op_name(value) != TRANSFER:
        return None
    source, destination = next(hosts_in(value.args[0].ty), None), host_of(value.attrs.dst_vdevice)
    return (source, destination) if source and destination and source != destination else None


def hosts_in(ty: tvm.ir.Type) -> Iterator[str]:
    """The hosts of the tensors of a type."""
    for tensor in tensor_types(ty):
        if tensor.vdevice is not None and (host := host_of(tensor.vdevice)) is not None:
            yield host


def parameter_symbols(func: relax.Function) -> list[relax.Var]:
    """The symbolic sizes that the parameters of a function define, in order."""
    return list(dict.fromkeys(symbol for param in func.params for symbol in symbols_in(param.ty)))


def leaves_of(ty: tvm.ir.Type) -> Iterator[tvm.ir.Type]:
    """The types in a type, tuples flattened in order."""
    if isinstance(ty, tvm.ir.TupleType):
        for field_ty in ty.fields:
            yield from leaves_of(field_ty)
    else:
        yield ty


def _is_size_like(var: relax.Var) -> bool:
    """Return whether a variable, or a field of it, lacks a device."""
    return any(not isinstance(ty, (relax.TensorType, relax.FuncType)) for ty in leaves_of(var.ty))


def _calls_closure(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and (
        (isinstance(value.op, relax.Var) and isinstance(value.op.ty, relax.FuncType))
        or op_name(value) in ("relax.make_closure", "relax.invoke_closure", "relax.invoke_pure_closure")
    )


def has_effect(value: relax.Call) -> bool:
    """Return whether a call, other than of a function of the module, has side effects besides in-place writes."""
    if isinstance(value.op, relax.ExternFunc):
        return True
    return isinstance(value.op, tvm.ir.Op) and value.op.name in ("relax.print", "relax.assert_op")
