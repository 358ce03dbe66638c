"""PartitionByHost: each function becomes one function per host, with sends and receives for transfers between hosts.

Before::

    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "keys": ["cpu", "host:a"]}),
                                       I.vdevice({"kind": "llvm", "keys": ["cpu", "host:b"]})]})

    def main(x: a/llvm:0):
        y = R.call_tir(cls.f, (x,), ...a/llvm:0)
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.call_tir(cls.g, (z,), ...b/llvm:0)
        return w

After::

    def main_a(x: a/llvm:0):                # attributes: host "a", function "main"
        y = R.call_tir(cls.f, (x,), ...a/llvm:0)
        R.call_packed("relax_hetero.host.send", y, R.str("b"), R.prim_value(0))
        return R.shape([])

    def main_b(x: R.Shape(ndim=0)):
        z = R.call_packed("relax_hetero.host.receive", R.str("a"), R.prim_value(0), ...b/llvm:0)
        w = R.call_tir(cls.g, (z,), ...b/llvm:0)
        return w

The number of a send and of its receive is its channel, unique in the module. A parameter, operand or result of another
host is the empty shape, so that tuples and calls keep their structure. Values without a device (shapes and numbers) are
computed on each host that needs them; if they come from a tensor, its host sends them. A function whose tensors on a
host do not define all symbolic sizes takes them as its first parameter there. Both branches of an ``If`` are on every
host that works in one of them, and its condition is sent to these.

Kernels keep their names; `relax_hetero.cluster` makes the module of each host.

Assumes RealizeVDevice; after FormDispatches, encoded tensors cross in the layout of their receiver. A module whose
vdevices name no hosts is returned as it is, and so is a partitioned one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ...errors import BuildError
from ...target.hosts import host_of, hosts_of
from ...target.vdevice import host_vdevice, identifier, vdevices_of
from ..ir.declare import declare_pass
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    is_tensor_constant,
    relax_functions,
    sequence,
    tensor_types,
    typed,
    walk_bindings,
    with_fresh_sizes,
)
from .host_needs import HostNeeds, Hosts, crossing, hosts_in, parameter_symbols, participants_of

SEND = "relax_hetero.host.send"  # packed function (value, host, channel): sends a value to another host
RECEIVE = "relax_hetero.host.receive"  # packed function (host, channel): receives a value from another host
HOST = "relax_hetero.host"  # function attribute: the host of a part
PART_OF = "relax_hetero.part_of"  # function attribute: the name of the function before partitioning
SIZES_FIRST = "relax_hetero.sizes_first"
"""Function attribute: its first parameter is a shape of symbolic sizes, which partitioning added."""

_REMOTE = relax.ShapeType(ndim=0)  # TVMScript cannot parse ShapeType([])


def partition_by_host(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    VDeviceError
        If some vdevices name a host and others do not.
    BuildError
        If the module has closures, an object is needed on two hosts, or a tensor has no device; the message names the
        function and the variable.
    """
    vdevices = vdevices_of(mod)
    functions = relax_functions(mod)
    if not hosts_of(vdevices) or any(HOST in func.attrs for _, func in functions):
        return mod
    return _Partition(mod, functions).module()


PartitionByHost = declare_pass("PartitionByHost", partition_by_host)


class _Partition:
    """Partitioning of a module: the parts of all functions."""

    def __init__(self, mod: tvm.IRModule, functions: Sequence[tuple[tvm.ir.GlobalVar, relax.Function]]) -> None:
        self.mod, self.functions = mod, functions
        self.vdevices = vdevices_of(mod)
        self.hosts: Hosts = tuple(hosts_of(self.vdevices))
        self.participants = participants_of(functions, self.hosts)
        self.needs = HostNeeds(self.hosts, self.participants)
        self.symbols: dict[tuple[tvm.ir.GlobalVar, str], tvm.ir.GlobalVar] = {}
        self.channels = 0
        used_names = {gv.name_hint for gv in mod.get_global_vars()}
        for gv, _ in functions:
            for host in self.participants[gv]:
                base = f"{gv.name_hint}_{identifier(host)}"
                self.symbols[gv, host] = fresh_global_var(base, tvm.ir.Type.missing(), used_names)

    def module(self) -> tvm.IRModule:
        table = {gv: func for gv, func in self.mod.functions.items() if not isinstance(func, relax.Function)}
        for gv, func in self.functions:
            self.needs.add(gv, func)
            for host, part in _Function(self, gv, func).parts().items():
                table[typed(self.symbols[gv, host], part.ty)] = part
        return copy_module(self.mod, table)

    def sizes_of(self, callee: relax.Function, host: str) -> list[relax.Var]:
        """The symbolic sizes that the part of a function for a host takes as a parameter."""
        defined = {
            extent
            for param in callee.params
            for ty in ([projected(param.ty, host)])
            for extent in _symbols_defined_by(ty)
        }
        return [symbol for symbol in parameter_symbols(callee) if symbol not in defined]


class _Function:
    """Partitioning of one function: all its parts are emitted together."""

    def __init__(self, partition: _Partition, gv: tvm.ir.GlobalVar, func: relax.Function) -> None:
        self.partition, self.gv, self.func = partition, gv, func
        self.hosts = partition.participants[gv]
        self.names: dict[str, dict[relax.Var, relax.Expr]] = {host: {} for host in self.hosts}
        self.bound_vars: set[relax.Var] = set()
        self.bindings: dict[str, list[relax.Binding]] = {host: [] for host in self.hosts}
        self.communicating: set[str] = set()

    def parts(self) -> dict[str, relax.Function]:
        """The function's part for each host."""
        params = {host: self._params(host) for host in self.hosts}
        self._emit(list(walk_bindings(self.func.body, nested=False)))
        parts = {}
        for host in self.hosts:
            result = self._projected_expr(self.func.body.body, host)
            body = sequence(self.bindings[host], result)
            is_pure = bool(self.func.is_pure) and host not in self.communicating
            part = relax.Function(params[host], body, projected(self.func.ret_ty, host), is_pure, self.func.attrs)
            part = part.with_attr(HOST, host).with_attr(PART_OF, self.gv.name_hint)
            if "global_symbol" in self.func.attrs:
                part = part.with_attr("global_symbol", self.partition.symbols[self.gv, host].name_hint)
            if self.partition.sizes_of(self.func, host):
                part = part.with_attr(SIZES_FIRST, True)
                if "num_input" in self.func.attrs:
                    part = part.with_attr("num_input", int(self.func.attrs["num_input"]) + 1)
            parts[host] = with_fresh_sizes(part)
        return parts

    def _params(self, host: str) -> list[relax.Var]:
        sizes = self.partition.sizes_of(self.func, host)
        params = [relax.Var("sizes", relax.ShapeType(sizes))] if sizes else []
        for param in self.func.params:
            self.bound_vars.add(param)
            new = relax.Var(param.name, projected(param.ty, host))
            params.append(new)
            if not _is_remote(param.ty, host):
                self.names[host][param] = new
        return params

    def _emit(self, bindings: Sequence[relax.Binding]) -> None:
        for binding in bindings:
            self.bound_vars.add(binding.var)
            ends = crossing(binding)
            if ends is not None:
                self._check_device(binding)
                self._transfer(binding.value.args[0], binding.var, *ends)
                continue
            evaluation = self.partition.needs.evaluations[binding.var]
            if isinstance(binding.value, relax.If):
                self._branch(binding, evaluation.hosts)
            else:
                for host in evaluation.hosts:
                    self._evaluate(binding, host)
            for host in evaluation.sent_to:
                self._send_sizes(binding, evaluation.hosts[0], host, evaluation.sizes)

    def _evaluate(self, binding: relax.Binding, host: str) -> None:
        self._check_device(binding)
        value = self._projected_expr(binding.value, host)
        var = self._define_on(binding.var, host)
        if isinstance(binding, relax.MatchCast):
            self.bindings[host].append(relax.MatchCast(var, value, projected(binding.ty, host), binding.span))
        else:
            self.bindings[host].append(relax.VarBinding(var, value, binding.span))

    def _transfer(self, value: relax.Expr, var: relax.Var, source: str, destination: str) -> None:
        """Send a value, and bind the variable to it on the destination."""
        channel = self._send(self._projected_expr(value, source), source, destination)
        self._receive(self._define_on(var, destination), source, destination, channel)

    def _send_sizes(self, binding: relax.Binding, source: str, destination: str, sizes: Sequence[relax.Var]) -> None:
        """Send values without a device: the variable itself if it is one, and the sizes that its binding defines."""
        var = binding.var
        if not any(tensor_types(var.ty)):
            self._transfer(var, var, source, destination)
        elif isinstance(var.ty, tvm.ir.TupleType):
            raise BuildError(
                f"function {self.gv.name_hint!r}: host {destination!r} needs the shape in tuple {var.name!r}, whose "
                f"tensors are on {source!r}; expected a variable of its own for the shape"
            )
        if sizes:
            channel = self._send(relax.ShapeExpr(list(sizes)), source, destination)
            raw = self._receive(relax.Var("sizes", relax.ShapeType(ndim=len(sizes))), source, destination, channel)
            ty = relax.ShapeType(list(sizes))
            self.bindings[destination].append(relax.MatchCast(relax.Var("sizes", ty), raw, ty))

    def _send(self, value: relax.Expr, source: str, destination: str) -> int:
        channel = self.partition.channels
        self.partition.channels += 1
        empty = tvm.ir.TupleType([])
        args = [value, tvm.ir.StringImm(destination), relax.prim_value(channel)]
        call = typed(relax.Call(relax.ExternFunc(SEND), args, ty_args=[empty]), empty)
        self.bindings[source].append(relax.VarBinding(relax.Var("sent", empty), call))
        self.communicating |= {source, destination}
        return channel

    def _receive(self, var: relax.Var, source: str, destination: str, channel: int) -> relax.Var:
        args = [tvm.ir.StringImm(source), relax.prim_value(channel)]
        call = typed(relax.Call(relax.ExternFunc(RECEIVE), args, ty_args=[var.ty]), var.ty)
        self.bindings[destination].append(relax.VarBinding(var, call))
        return var

    def _branch(self, binding: relax.Binding, hosts: Hosts) -> None:
        value = binding.value
        conditions: dict[str, relax.Expr] = {}
        cond_host = next(iter(hosts_in(value.cond.ty)), None)
        for host in hosts:
            if cond_host is None or cond_host == host:
                conditions[host] = self._projected_expr(value.cond, host)
            else:
                conditions[host] = self._condition(value.cond, cond_host, host)
        outer, branches = self.bindings, []
        for branch in (value.true_branch, value.false_branch):
            self.bindings = {host: [] for host in self.hosts}
            self._emit(list(walk_bindings(branch, nested=False)))
            branches.append(
                {host: sequence(self.bindings[host], self._projected_expr(branch.body, host)) for host in hosts}
            )
        self.bindings = outer
        for host in hosts:
            ty = projected(value.ty, host)
            value_on_host = typed(relax.If(conditions[host], branches[0][host], branches[1][host], value.span), ty)
            self.bindings[host].append(
                relax.VarBinding(self._define_on(binding.var, host), value_on_host, binding.span)
            )

    def _condition(self, cond: relax.Expr, source: str, destination: str) -> relax.Var:
        cpu = host_vdevice(self.partition.vdevices, self._first_on(destination))
        ty = relax.TensorType(cond.ty.shape, cond.ty.dtype, cpu or self._first_on(destination))
        channel = self._send(self._projected_expr(cond, source), source, destination)
        return self._receive(relax.Var("condition", ty), source, destination, channel)

    def _first_on(self, host: str) -> relax.VDevice:
        return next(vdevice for vdevice in self.partition.vdevices if host_of(vdevice) == host)

    def _define_on(self, var: relax.Var, host: str) -> relax.Var:
        new = relax.Var(var.name, projected(var.ty, host))
        self.names[host][var] = new
        return new

    def _projected_expr(self, expr: relax.Expr, host: str) -> relax.Expr:
        """An expression in the part for a host."""
        if isinstance(expr, relax.Var):
            return self._name(expr, host)
        if is_tensor_constant(expr):
            return _remote_placeholder(expr.ty) if _is_remote(expr.ty, host) else expr
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._projected_expr(field, host) for field in expr.fields], expr.span)
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._projected_expr(expr.tuple_value, host), int(expr.index), expr.span)
        if isinstance(expr, relax.Call) and not isinstance(expr.ty, tvm.ir.PrimType):
            return self._call(expr, host)
        return structural_map(expr, (relax.Var, lambda var: self._name(var, host)))

    def _call(self, call: relax.Call, host: str) -> relax.Expr:
        args = [arg if isinstance(arg, tvm.ir.GlobalVar) else self._projected_expr(arg, host) for arg in call.args]
        op, ty = call.op, projected(call.ty, host)
        callee = self.partition.mod.functions.get(op) if isinstance(op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function):
            sizes = self.partition.sizes_of(callee, host)
            if sizes:
                values = _sizes_at(callee, call)
                args.insert(0, structural_map(relax.ShapeExpr([values[s] for s in sizes]), self._renaming(host)))
            op = self.partition.symbols[op, host]
            if not callee.is_pure or len(self.partition.participants[call.op]) > 1:
                self.communicating.add(host)
        types = [structural_map(ty_arg, self._renaming(host)) for ty_arg in call.ty_args]
        return typed(relax.Call(op, args, call.attrs, types, call.span), ty)

    def _renaming(self, host: str) -> tuple:
        return relax.Var, lambda var: self._name(var, host)

    def _name(self, var: relax.Var, host: str) -> relax.Expr:
        """The variable's name on a host; symbolic sizes keep theirs, and remote values become placeholders."""
        if var in self.names[host]:
            return self.names[host][var]
        return _remote_placeholder(var.ty) if var in self.bound_vars else var

    def _check_device(self, binding: relax.Binding) -> None:
        if any(tensor.vdevice is None for tensor in tensor_types(binding.var.ty)):
            raise BuildError(
                f"function {self.gv.name_hint!r}: {binding.var.name!r} has no device; PartitionByHost expects a module "
                "that RealizeVDevice placed"
            )


def projected(ty: tvm.ir.Type, host: str) -> tvm.ir.Type:
    """A type in the part for a host: tensors of other hosts become the empty shape."""
    if isinstance(ty, relax.TensorType):
        return _REMOTE if _is_remote(ty, host) else ty
    if isinstance(ty, tvm.ir.TupleType):
        return tvm.ir.TupleType([projected(field, host) for field in ty.fields])
    return ty


def _is_remote(ty: tvm.ir.Type, host: str) -> bool:
    return isinstance(ty, relax.TensorType) and ty.vdevice is not None and host_of(ty.vdevice) != host


def _remote_placeholder(ty: tvm.ir.Type) -> relax.Expr:
    """Placeholder for a value of another host: the empty shape, or a tuple of them for a tuple."""
    if isinstance(ty, tvm.ir.TupleType):
        return relax.Tuple([_remote_placeholder(field) for field in ty.fields])
    return relax.ShapeExpr([])


def _symbols_defined_by(ty: tvm.ir.Type) -> list[relax.Var]:
    """The symbolic sizes that a value of a type defines: its extents that are variables."""
    if isinstance(ty, tvm.ir.TupleType):
        return [extent for field in ty.fields for extent in _symbols_defined_by(field)]
    shape = ty.shape if isinstance(ty, relax.TensorType) else ty if isinstance(ty, relax.ShapeType) else None
    return [extent for extent in (getattr(shape, "values", None) or ()) if isinstance(extent, relax.Var)]


def _sizes_at(callee: relax.Function, call: relax.Call) -> dict[relax.Var, relax.Expr]:
    """Values of a function's symbolic sizes at a call."""
    sizes: dict[relax.Var, relax.Expr] = {}
    pending = [(param.ty, arg.ty) for param, arg in zip(callee.params, call.args, strict=True)]
    while pending:
        param_ty, arg_ty = pending.pop()
        if isinstance(param_ty, tvm.ir.TupleType):
            pending += list(zip(param_ty.fields, arg_ty.fields, strict=True))
        elif isinstance(param_ty, (relax.TensorType, relax.ShapeType)):
            shapes = [ty.shape if isinstance(ty, relax.TensorType) else ty for ty in (param_ty, arg_ty)]
            extents = [list(getattr(shape, "values", None) or ()) for shape in shapes]
            for symbol, value in zip(*extents, strict=False):
                if isinstance(symbol, relax.Var):
                    sizes.setdefault(symbol, value)
    missing = [symbol.name for symbol in parameter_symbols(callee) if symbol not in sizes]
    if missing:
        raise BuildError(f"call of {call.op.name_hint!r}: its size {missing[0]!r} is not in the types of its arguments")
    return sizes
