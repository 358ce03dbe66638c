"""A module whose vdevices are on several hosts becomes a program: a module for each host, and plans of calls.

The module goes through the pipeline as a whole up to its kernels, so that tensors cross in the layout of their
receiver. Then `PartitionByHost` cuts its functions, `host_steps` cuts the parts into steps, and each host gets a module
with its steps, its kernels and its weights alone, on vdevices without a host. The host compiles it, from command
buffers on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tvm
from tvm import relax
from tvm.target import Target

from ...artifact.signature import FunctionSignature
from ...driver.bind_params import bind_defaults
from ...driver.compile import prepare_module, run_steps
from ...driver.link.parallel_codegen import Progress
from ...driver.signatures import signatures_before_lowering
from ...errors import BuildError
from ...target.hosts import host_of, hosts_of, is_native, on_host
from ...target.make_vdevice import VDevice
from ...target.vdevice import vdevices_of
from ...transform.ir.rewriting import global_vars_in, relax_functions, typed
from ...transform.partition.form_schedules import step_function
from ...transform.partition.host_needs import leaves_of
from ...transform.partition.partition_by_host import HOST, PART_OF, SIZES_FIRST, partition_by_host
from ...transform.pipeline import steps_before_hosts
from ...transform.placement.update_vdevice import succeed_vdevices
from ...transform.record.donated import without_donated
from ..call_plan import CALL, CallPlan, HostRun, HostStep, Program, Source
from .host_parts import HostPart, exchanges_inside, read_part

# Steps of a partitioned function: each host's part is cut where it waits for another host.
#
# `PartitionByHost` leaves a function for each host, with sends and receives inside. A host that ran such a function
# whole would stand still at every receive. So a part is cut into *steps*, functions that take what arrives as
# parameters and return what is sent, and a `CallPlan` says which value goes where:
#
# - The *level* of a binding is how often values cross hosts on the longest way from the call to it. The bindings of one
#   host and one level are a step; values go from lower levels to higher ones, so no two steps wait for each other, and
#   there are no more steps than crossings in a row demand.
# - A step from which nothing goes to another host joins the next one of its host.
#
# Parts that exchange messages inside of a branch, or in a function that they call, cannot be cut: what they send
# depends on values.


class HostVar(NamedTuple):
    """A variable of a host."""

    host: str
    var: relax.Var


Key: TypeAlias = "tuple[int, str]"
"""A step before it has a number: level and host."""


@dataclass
class CutFunction:
    """A function cut into steps.

    Attributes
    ----------
    steps : list of HostStep
        In an order in which they can run.
    sizes : list of tuple of str
        Inputs behind the call's own: shapes of these symbolic sizes.
    result : object
        As in `CallPlan`; an empty tuple stands for an empty shape.
    functions : dict of str to dict of str to relax.Function
        Functions of the steps, by host and name.
    """

    steps: list[HostStep] = field(default_factory=list)
    sizes: list[tuple[str, ...]] = field(default_factory=list)
    result: Any = ()
    functions: dict[str, dict[str, relax.Function]] = field(default_factory=dict)


def cut_steps(name: str, parts: Mapping[str, HostPart], inputs: int) -> CutFunction:
    """A function of `inputs` inputs, tuples opened, cut into steps.

    Raises
    ------
    BuildError
        If its parts wait for each other.
    """
    return _Cutter(name, parts, inputs).cut()


class _Cutter:
    def __init__(self, name: str, parts: Mapping[str, HostPart], inputs: int) -> None:
        self._name, self._parts, self._inputs = name, parts, inputs
        self._senders = {channel: (host, var) for host, part in parts.items() for channel, var in part.sends.items()}
        self._bring_to_first_host()
        self._result = self._result_places([part.result for part in parts.values()])
        self._bound = {HostVar(host, b.var) for host, part in parts.items() for b in part.bindings}
        self._levels: dict[HostVar, int] = {}
        self._cut = CutFunction(functions={host: {} for host in parts})

    def cut(self) -> CutFunction:
        self._find_levels()
        self._join_silent()
        hosts = list(self._parts)
        keys = sorted({(self._levels[HostVar(host, b.var)], hosts.index(host)) for host, b in self._work()})
        # A function that does nothing, as it returns inputs alone, has one step that does nothing.
        self._keys: list[Key] = [(level, hosts[rank]) for level, rank in keys or [(0, 0)]]
        wanted = self._needed()
        self._makes = {
            key: [
                b.var
                for b in self._parts[key[1]].bindings
                if HostVar(key[1], b.var) in wanted and self._key(key[1], b.var) == key
            ]
            for key in self._keys
        }
        for key in self._keys:
            self._add_step(key)
        self._cut.result = self._sources(self._result)
        return self._cut

    def _work(self) -> list[tuple[str, relax.Binding]]:
        return [(host, b) for host, part in self._parts.items() for b in part.bindings if b.var not in part.free]

    def _origin(self, host: str, var: relax.Var) -> HostVar:
        """Where a value that arrived was made: another host's variable that did not arrive there itself."""
        while var in self._parts[host].receives:
            host, var = self._senders[self._parts[host].receives[var]]
        return HostVar(host, var)

    def _bring_to_first_host(self) -> None:
        """Values that come back to the host that made them never left it."""
        for host, part in self._parts.items():
            for var in list(part.receives):
                source, made = self._origin(host, var)
                if source == host:
                    part.keep(var, made)
        self._senders = {c: (host, var) for host, part in self._parts.items() for c, var in part.sends.items()}

    def _find_levels(self) -> None:
        """The level of every binding; hosts take turns, as each waits for others."""
        waiting = {host: list(part.bindings) for host, part in self._parts.items()}
        last = dict.fromkeys(waiting, 0)
        moved = True
        while moved:
            moved = False
            for host, bindings in waiting.items():
                done = 0
                for binding in bindings:
                    level = self._level(host, binding)
                    if level is None:
                        break
                    if self._parts[host].in_order and binding.var not in self._parts[host].free:
                        level = last[host] = max(level, last[host])
                    self._levels[HostVar(host, binding.var)] = level
                    done += 1
                moved = moved or done > 0
                waiting[host] = bindings[done:]
        stuck = {host: bindings[0].var.name for host, bindings in waiting.items() if bindings}
        if stuck:
            raise BuildError(f"function {self._name!r}: hosts wait for each other, at {stuck}")

    def _level(self, host: str, binding: relax.Binding) -> int | None:
        """The level that a binding needs; None where it is not known yet."""
        level = 0
        for var in self._parts[host].reads(binding):
            source, made = self._origin(host, var)
            if made in self._parts[source].params or HostVar(source, made) not in self._bound:
                continue
            found = self._levels.get(HostVar(source, made))
            if found is None:
                return None
            level = max(level, found + (source != host))
        return level

    def _join_silent(self) -> None:
        """Steps that send nothing join the next one of their host."""
        loud = {
            (source, self._levels[HostVar(source, made)])
            for host, part in self._parts.items()
            for source, made in (self._origin(host, var) for binding in part.bindings for var in part.reads(binding))
            if source != host and HostVar(source, made) in self._levels
        }
        for host, part in self._parts.items():
            levels = sorted({self._levels[HostVar(host, b.var)] for b in part.bindings if b.var not in part.free})
            new: dict[int, int] = {}
            following = None
            for level in reversed(levels):
                is_silent = following is not None and (host, level) not in loud
                following = new[level] = following if is_silent and following is not None else level
            for binding in part.bindings:
                at = self._levels[HostVar(host, binding.var)]
                self._levels[HostVar(host, binding.var)] = new.get(at, at)

    def _key(self, host: str, var: relax.Var) -> Key:
        return self._levels[HostVar(host, var)], host

    def _closed(self, key: Key) -> tuple[list[relax.Binding], list[relax.Var]]:
        """The bindings of a step, with the free ones that they need, and the variables that they take from outside."""
        part = self._parts[key[1]]
        by_var = {b.var: b for b in part.bindings}
        own = [b for b in part.bindings if b.var not in part.free and self._key(key[1], b.var) == key]
        inside = {b.var for b in own}
        outside: dict[relax.Var, None] = {}
        pending = list(own)
        while pending:
            for var in part.reads(pending.pop()):
                if var in inside:
                    continue
                if var in part.free:
                    inside.add(var)
                    pending.append(by_var[var])
                elif var in by_var or var in part.params or var in part.receives:
                    outside[var] = None
        bindings = [b for b in part.bindings if b.var in inside]
        order = {var: index for index, var in enumerate((*part.params, *part.receives, *by_var))}
        return bindings, sorted(outside, key=order.__getitem__)

    def _needed(self) -> set[HostVar]:
        """Values that steps have to return: for other steps, and for the caller."""
        wanted = {self._origin(host, var) for host, var in self._leaves(self._result)}
        for key in self._keys:
            wanted |= {self._origin(key[1], var) for var in self._closed(key)[1]}
        return wanted

    def _add_step(self, key: Key) -> None:
        host = key[1]
        bindings, reads = self._closed(key)
        function = f"{self._name}_{len(self._cut.functions[host])}"
        func, sizes = step_function(bindings, reads, self._makes[key], is_pure=not self._parts[host].in_order)
        arguments = [self._source(host, var) for var in reads]
        if sizes:
            arguments.append(self._size_input(sizes))
        self._cut.functions[host][function] = func.with_attr("global_symbol", function)
        self._cut.steps.append(HostStep(host, function, tuple(arguments), len(self._makes[key])))

    def _size_input(self, sizes: tuple[str, ...]) -> Source:
        if sizes not in self._cut.sizes:
            self._cut.sizes.append(sizes)
        return Source(CALL, self._inputs + self._cut.sizes.index(sizes))

    def _source(self, host: str, var: relax.Var) -> Source:
        host, var = self._origin(host, var)
        number = self._parts[host].params.get(var)
        if number is not None:
            return Source(CALL, number)
        key = self._key(host, var)
        return Source(self._keys.index(key), self._makes[key].index(var))

    def _result_places(self, results: Sequence[relax.Expr]) -> Any:
        """The result, each leaf as a variable of the host that has it."""
        if isinstance(results[0], relax.Tuple):
            return tuple(
                self._result_places([each.fields[i] for each in results]) for i in range(len(results[0].fields))
            )
        for (host, part), value in zip(self._parts.items(), results, strict=True):
            if isinstance(value.ty, relax.ShapeType) and int(value.ty.ndim) == 0:
                continue  # it is elsewhere
            return HostVar(host, part.variable_of(value))
        return ()

    def _leaves(self, result: Any) -> list[HostVar]:
        if isinstance(result, HostVar):
            return [result]
        return [place for each in result for place in self._leaves(each)]

    def _sources(self, result: Any) -> Any:
        if isinstance(result, HostVar):
            return self._source(*result)
        return tuple(map(self._sources, result))


# Plans of functions that cannot be cut into steps: hosts run their whole parts and exchange messages.


def plan_of_runs(
    signature: FunctionSignature, parts: Mapping[str, tuple[tvm.ir.GlobalVar, relax.Function]], inputs: int
) -> CallPlan:
    """The plan of a function by its part for each host.

    Parameters
    ----------
    inputs : int
        Number of inputs of the function, tuples opened.
    """
    runs: list[HostRun] = []
    sizes: list[tuple[str, ...]] = []
    for host, (gv, func) in parts.items():
        params, arguments = list(func.params), []
        if SIZES_FIRST in func.attrs:
            arguments.append(Source(CALL, inputs + len(sizes)))
            sizes.append(tuple(str(symbol.name) for symbol in params.pop(0).ty.values))
        numbers = iter(range(inputs))
        arguments += [_argument(param.ty, numbers) for param in params]
        runs.append(HostRun(host, gv.name_hint, tuple(arguments)))
    result = _result([func.ret_ty for _, func in parts.values()], iter(range(1 << 30)))
    return CallPlan((), result, signature=signature, sizes=tuple(sizes), runs=tuple(runs))


def _argument(ty: tvm.ir.Type, numbers: Iterator[int]) -> Any:
    if isinstance(ty, tvm.ir.TupleType):
        return tuple(_argument(field, numbers) for field in ty.fields)
    number = next(numbers)
    return None if _is_nothing(ty) else Source(CALL, number)


def _result(types: Sequence[tvm.ir.Type], numbers: Iterator[int]) -> Any:
    """The result, each leaf from the first run that has it."""
    if isinstance(types[0], tvm.ir.TupleType):
        return tuple(_result([ty.fields[index] for ty in types], numbers) for index in range(len(types[0].fields)))
    number = next(numbers)
    return next((Source(run, number) for run, ty in enumerate(types) if not _is_nothing(ty)), ())


def _is_nothing(ty: tvm.ir.Type) -> bool:
    """Return whether a type is what stands for values of other hosts."""
    return isinstance(ty, relax.ShapeType) and int(ty.ndim) == 0


Hardware: TypeAlias = "tuple[str, int]"
"""A kind of device, and its number on its host."""


def native_hardware(mod: tvm.IRModule) -> dict[str, list[Hardware]]:
    """Devices of a module that stand for whatever hardware is there, by host."""
    found: dict[str, list[Hardware]] = {}
    for vdevice in vdevices_of(mod):
        host = host_of(vdevice)
        if host is not None and is_native(vdevice.target):
            found.setdefault(host, []).append((str(vdevice.target.kind.name), int(vdevice.vdevice_id)))
    return found


def cut_module(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    natives: Mapping[str, Mapping[Hardware, Target]] | None = None,
    progress: Progress | None = None,
) -> Program:
    """The program of a module over hosts.

    Parameters
    ----------
    mod, params, accuracy, progress
        As `rh.compile` takes them; every vdevice is on a host.
    natives : mapping of str to mapping of Hardware to Target, optional
        Targets of the hardware there by host, kind and number, for vdevices that name a kind alone.

    Raises
    ------
    HeteroError
        Vdevices without a host, a native vdevice whose host has not said what it is; what `rh.compile` raises.
    """
    if isinstance(mod, tvm.IRModule) and natives is not None:
        mod = with_natives(mod, natives)
    mod = prepare_module(mod, params, None, "default", accuracy, "rh.cluster")
    mod = bind_defaults(mod)  # hosts are sent what a call gives, and keep constants alone
    mod = without_donated(mod)  # what a host gets is a copy, or memory of Ray that it may not write to
    hosts = hosts_of(vdevices_of(mod))
    mod = run_steps(mod, steps_before_hosts(), progress)
    signatures = signatures_before_lowering(mod)
    return program_of_parts(partition_by_host(mod), hosts, signatures)


def program_of_parts(mod: tvm.IRModule, hosts: Sequence[str], signatures: Mapping[str, FunctionSignature]) -> Program:
    """The program of a module that `PartitionByHost` cut.

    Parameters
    ----------
    signatures : mapping of str to FunctionSignature
        Signatures of the functions that can be called, as they were before.
    """
    functions: dict[str, dict[str, relax.Function]] = {host: {} for host in hosts}
    plans = {}
    for name, signature in signatures.items():
        found = {
            str(func.attrs[HOST]): (gv, func) for gv, func in relax_functions(mod) if func.attrs.get(PART_OF) == name
        }
        parts = {host: found[host] for host in hosts if host in found}
        first = next(iter(parts.values()))[1]
        given = list(first.params)[1 if SIZES_FIRST in first.attrs else 0 :]
        inputs = sum(1 for param in given for _ in leaves_of(param.ty))
        if any(exchanges_inside(mod, func) for _, func in parts.values()):
            plans[name] = plan_of_runs(signature, parts, inputs)
            for host, (gv, func) in parts.items():
                functions[host][gv.name_hint] = func
            continue
        read = {host: read_part(mod, host, func) for host, (_, func) in parts.items()}
        cut = cut_steps(name, read, inputs)
        for host, steps in cut.functions.items():
            functions[host] |= steps
        plans[name] = CallPlan(tuple(cut.steps), cut.result, signature=signature, sizes=tuple(cut.sizes))
    modules = {host: _module_of(mod, host, functions[host]) for host in hosts if functions[host]}
    return Program(modules, plans)


def with_natives(mod: tvm.IRModule, natives: Mapping[str, Mapping[Hardware, Target]]) -> tvm.IRModule:
    """The module with vdevices that name a kind of hardware alone made those of their hosts."""
    old = vdevices_of(mod)
    new = []
    for vdevice in old:
        host, kind = host_of(vdevice), str(vdevice.target.kind.name)
        target = vdevice.target
        if host is not None and is_native(target):
            hardware = kind, int(vdevice.vdevice_id)
            if hardware not in natives.get(host, {}):
                raise BuildError(f"host {host!r} has no device {kind}:{hardware[1]}, which the module names")
            target = on_host(natives[host][hardware], host)
        same = target.same_as(vdevice.target)
        new.append(vdevice if same else tvm.relax.VDevice(target, int(vdevice.vdevice_id), str(vdevice.memory_scope)))
    return succeed_vdevices(mod, new, new)


def _module_of(mod: tvm.IRModule, host: str, steps: Mapping[str, relax.Function]) -> tvm.IRModule:
    """A module of some functions, and of all that they call, for one host."""
    whole = {gv.name_hint: gv for gv, func in mod.functions.items() if gv.name_hint in steps}  # as others call them
    table: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {
        whole.get(name) or typed(tvm.ir.GlobalVar(name), func.ty): func for name, func in steps.items()
    }
    pending = list(table.values())
    while pending:
        func = pending.pop()
        for gv in global_vars_in(func.body):
            if gv not in table:
                table[gv] = mod.functions[gv]
                pending.append(mod.functions[gv])
    alone = tvm.IRModule(table, attrs=mod.attrs, global_infos=mod.global_infos)
    old = vdevices_of(mod)
    own = [VDevice(on_host(v.target, None), int(v.vdevice_id), str(v.memory_scope)) for v in old if host_of(v) == host]
    taken = iter(own)
    # No function here uses those of other hosts.
    return succeed_vdevices(alone, [next(taken) if host_of(v) == host else own[0] for v in old], own)
