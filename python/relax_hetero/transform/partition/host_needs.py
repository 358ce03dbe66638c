"""On which hosts each binding of a function is evaluated, and which of its values other hosts need.

A tensor is on one host, where its vdevice is. What has no device is a *size*: shapes, numbers, symbolic sizes that a
``match_cast`` finds. Code that computes sizes from sizes is evaluated on every host that needs them, since that is
cheaper than asking. Sizes that are read from a tensor are known where it is, and sent to the hosts that need them.
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
Needs: TypeAlias = "dict[str, set[relax.Var]]"
"""Sizes by the host that needs them."""


@dataclass(frozen=True)
class Evaluation:
    """Where a binding is evaluated.

    Attributes
    ----------
    hosts : Hosts
        Those that evaluate it.
    sent_to : Hosts
        Other hosts, which need the sizes that it makes.
    sizes : tuple of relax.Var
        The symbolic sizes that it finds.
    """

    hosts: Hosts
    sent_to: Hosts = ()
    sizes: tuple[relax.Var, ...] = ()


@dataclass
class HostNeeds:
    """Needs of the hosts of a module, function by function.

    Attributes
    ----------
    hosts : Hosts
        All hosts, in the order of the module's vdevices.
    participants : mapping of tvm.ir.GlobalVar to Hosts
        The hosts of each Relax function.
    evaluations : dict of relax.Var to Evaluation
        Evaluations by the variable of a binding.
    """

    hosts: Hosts
    participants: Mapping[tvm.ir.GlobalVar, Hosts]
    evaluations: dict[relax.Var, Evaluation] = field(default_factory=dict)
    _found: dict[relax.Var, tuple[relax.Var, ...]] = field(default_factory=dict)
    _working: set[str] = field(default_factory=set)
    _name: str = ""

    def add(self, gv: tvm.ir.GlobalVar, func: relax.Function) -> None:
        """Note the evaluations of a function's bindings."""
        self._name, self._working = gv.name_hint, set()
        given = set(sizes_of_parameters(func))
        self._find_sizes(func.body, set(given))
        hosts = self.participants[gv]
        result = set(filter(_is_size_like, used_vars(func.body.body))) | (set(symbols_in(func.ret_ty)) - given)
        needs: Needs = {host: set(result) for host in hosts}
        self._scan(list(walk_bindings(func.body, nested=False)), needs, given)

    def where(self, binding: relax.Binding) -> Hosts:
        """The hosts that must evaluate a binding; empty where it is evaluated wherever its sizes are needed."""
        value = binding.value
        found = set(hosts_in(binding.var.ty))
        if isinstance(value, relax.Function) or _calls_closure(value):
            raise BuildError(
                f"function {self._name!r}: {binding.var.name!r} is, or calls, a function inside a function; expected "
                "a module without closures where devices are on several hosts (relax.transform.LambdaLift makes one)"
            )
        if isinstance(value, relax.If):
            for inner in (*walk_bindings(value.true_branch), *walk_bindings(value.false_branch)):
                found |= set(self.where(inner)) | set(hosts_in(inner.var.ty))
            for branch in (value.true_branch, value.false_branch):
                found |= set(hosts_in(branch.body.ty))
        elif isinstance(value, relax.Call) and value.op in self.participants:
            found |= set(self.participants[value.op])
        elif isinstance(value, relax.Call) and not is_requirement(value):
            found |= {host for arg in value.args for host in hosts_in(arg.ty)}
            if not found and has_effect(value):
                found = {self.hosts[0]}
        elif isinstance(value, relax.TupleGetItem) and not found:  # a size beside tensors is known where they are
            found |= set(hosts_in(value.tuple_value.ty))
        elif is_tensor_constant(value):
            found |= set(hosts_in(value.ty))
        return tuple(host for host in self.hosts if host in found)

    def _find_sizes(self, body: relax.Expr, known: set[relax.Var]) -> None:
        """Which ``match_cast`` finds which symbolic sizes."""
        for binding in walk_bindings(body, nested=False):
            if isinstance(binding, relax.MatchCast):
                new = tuple(symbol for symbol in symbols_in(binding.ty) if symbol not in known)
                self._found[binding.var] = new
                known |= set(new)
            known.add(binding.var)
            if isinstance(binding.value, relax.If):
                self._find_sizes(binding.value.true_branch, set(known))
                self._find_sizes(binding.value.false_branch, set(known))

    def _scan(self, bindings: Sequence[relax.Binding], needs: Needs, known_sizes: set[relax.Var]) -> None:
        """From the last binding to the first: `needs` is what comes after, and becomes what comes before."""
        for binding in reversed(bindings):
            var, value = binding.var, binding.value
            found = self._found.get(var, ())
            made = {var, *found} if _is_size_like(var) else set(found)
            ends = crossing(binding)
            if ends is not None:
                self.evaluations[var] = Evaluation(ends)
                self._need(needs, ends, binding, known_sizes)
                continue
            hosts = self.where(binding)
            wanting = tuple(host for host in needs if needs[host] & made)
            if is_requirement(value):
                hosts = self._checked_on(value, needs, known_sizes)
            elif not hosts:
                hosts, wanting = wanting, ()
            elif isinstance(value, (relax.Call, relax.If)):
                self._working |= set(hosts)
            sent_to = tuple(host for host in wanting if host not in hosts)
            self.evaluations[var] = Evaluation(hosts, sent_to, found)
            if sent_to and any(isinstance(ty, relax.ObjectType) for ty in leaves_of(var.ty)):
                raise BuildError(
                    f"function {self._name!r}: {var.name!r} is an object of host {hosts[0]!r} that host {sent_to[0]!r} "
                    "needs; expected a tensor or a shape, which can be sent"
                )
            for host in (*hosts, *sent_to):
                needs[host] -= made
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
        """Hosts that evaluate a binding, or have its result, need the sizes that stand in it."""
        value = binding.value
        sizes = set(symbols_in(binding.var.ty))
        if not only_type and not isinstance(value, relax.If):
            sizes |= {symbol for symbol in symbols_in(value) if _is_size_like(symbol)}
            sizes |= {symbol for var in used_vars(value) for symbol in symbols_in(var.ty)}
        elif isinstance(value, relax.If):
            sizes |= set(filter(_is_size_like, used_vars(value.cond)))
        sizes -= known_sizes | {binding.var, *self._found.get(binding.var, ())}
        for host in hosts:
            needs[host] |= sizes

    def _checked_on(self, value: relax.Call, needs: Needs, known_sizes: set[relax.Var]) -> Hosts:
        """The hosts that check a requirement: those that know its sizes and work behind it, each before its own work.

        One that knows them where none of these works, and the first where none knows them.
        """
        sizes = set(symbols_in(value)) - known_sizes
        knowing = tuple(host for host in needs if sizes <= needs[host])
        return tuple(host for host in knowing if host in self._working) or knowing[:1] or (next(iter(needs)),)


def participants_of(
    functions: Sequence[tuple[tvm.ir.GlobalVar, relax.Function]], hosts: Hosts
) -> dict[tvm.ir.GlobalVar, Hosts]:
    """The hosts, of all `hosts`, of each function: of its tensors, and of the functions that it calls."""
    found: dict[tvm.ir.GlobalVar, set[str]] = {}
    calls: dict[tvm.ir.GlobalVar, set[tvm.ir.GlobalVar]] = {gv: set() for gv, _ in functions}
    for gv, func in functions:
        used = {host for param in func.params for host in hosts_in(param.ty)} | set(hosts_in(func.ret_ty))
        for binding in walk_bindings(func):
            used |= set(hosts_in(binding.var.ty))
            if isinstance(binding.value, relax.Call):
                used |= {host for arg in binding.value.args for host in hosts_in(arg.ty)}
                if binding.value.op in calls:
                    calls[gv].add(binding.value.op)
        found[gv] = used
    changed = True
    while changed:
        changed = False
        for gv, callees in calls.items():
            more = set().union(*(found[callee] for callee in callees)) - found[gv]
            found[gv] |= more
            changed = changed or bool(more)
    return {gv: tuple(host for host in hosts if host in used) or hosts[:1] for gv, used in found.items()}


def crossing(binding: relax.Binding) -> tuple[str, str] | None:
    """The hosts that a transfer goes from and to; None of what is no transfer, or stays on its host."""
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


def sizes_of_parameters(func: relax.Function) -> list[relax.Var]:
    """The symbolic sizes that the parameters of a function give, in order."""
    return list(dict.fromkeys(symbol for param in func.params for symbol in symbols_in(param.ty)))


def leaves_of(ty: tvm.ir.Type) -> Iterator[tvm.ir.Type]:
    """The types in a type, tuples opened, in order."""
    if isinstance(ty, tvm.ir.TupleType):
        for each in ty.fields:
            yield from leaves_of(each)
    else:
        yield ty


def _is_size_like(var: relax.Var) -> bool:
    """Return whether a variable, or a part of it, has no device."""
    return any(not isinstance(ty, (relax.TensorType, relax.FuncType)) for ty in leaves_of(var.ty))


def _calls_closure(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and (
        (isinstance(value.op, relax.Var) and isinstance(value.op.ty, relax.FuncType))
        or op_name(value) in ("relax.make_closure", "relax.invoke_closure", "relax.invoke_pure_closure")
    )


def has_effect(value: relax.Call) -> bool:
    """True if a call, of no function of the module, does something besides what it returns; writes are not meant."""
    if isinstance(value.op, relax.ExternFunc):
        return True
    return isinstance(value.op, tvm.ir.Op) and value.op.name in ("relax.print", "relax.assert_op")
