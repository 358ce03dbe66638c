"""Cuts a module over hosts into a program: a module for each host, and plans of calls.

The module first goes through the pipeline as a whole up to its kernels, so that tensors cross in the layout of their
receiver. Then `PartitionByHost` makes a part of each function for each host, `cut_steps` cuts the parts into steps, and
each host gets a module with only its own steps, kernels and weights, on vdevices without a host, which it compiles
from command buffers on.

A host that ran a part as a whole would block at every receive. So a part is cut into steps, functions that take
received values as parameters and return sent values, and a `CallPlan` says which value goes where:

- The level of a binding is the largest number of crossings between hosts on any path from the call to it. The bindings
of
  one host and one level are a step. Values go from lower to higher levels, so steps do not wait for each other, and
  there are no more of them than consecutive crossings.
- A step from which nothing goes to another host joins the next one of its host.

Parts that exchange messages inside of a branch, or in a function that they call, cannot be cut, since it depends on
values what they send.
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


class HostVar(NamedTuple):
    """A variable of a host."""

    host: str
    var: relax.Var


Key: TypeAlias = "tuple[int, str]"  # level and host of a step


@dataclass
class CutFunction:
    """A function cut into steps."""

    steps: list[HostStep] = field(default_factory=list)  # steps in topological order
    # Further inputs after those of the caller: shapes, each given by the names of symbolic sizes.
    sizes: list[tuple[str, ...]] = field(default_factory=list)
    result: Any = ()  # as in `CallPlan`; an empty tuple means an empty shape
    # Functions of the steps, by host and name.
    functions: dict[str, dict[str, relax.Function]] = field(default_factory=dict)


def cut_steps(name: str, parts: Mapping[str, HostPart], inputs: int) -> CutFunction:
    """Cut a function with `inputs` inputs (tuples flattened) into steps.

    Raises BuildError if its parts wait for each other.
    """
    return _Cutter(name, parts, inputs).cut()


class _Cutter:
    def __init__(self, name: str, parts: Mapping[str, HostPart], inputs: int) -> None:
        self._name, self._parts, self._inputs = name, parts, inputs
        self._senders = {channel: (host, var) for host, part in parts.items() for channel, var in part.sends.items()}
        self._keep_own_values()
        self._result = self._locate_result([part.result for part in parts.values()])
        self._bound = {HostVar(host, b.var) for host, part in parts.items() for b in part.bindings}
        self._levels: dict[HostVar, int] = {}
        self._cut = CutFunction(functions={host: {} for host in parts})

    def cut(self) -> CutFunction:
        self._find_levels()
        self._join_steps()
        hosts = list(self._parts)
        keys = sorted({(self._levels[HostVar(host, b.var)], hosts.index(host)) for host, b in self._work()})
        # A function that only returns inputs has one empty step.
        self._keys: list[Key] = [(level, hosts[rank]) for level, rank in keys or [(0, 0)]]
        returned = self._returned()
        self._step_results = {
            key: [
                b.var
                for b in self._parts[key[1]].bindings
                if HostVar(key[1], b.var) in returned and self._key(key[1], b.var) == key
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
        """Follow a received variable to the host and variable that computed it."""
        while var in self._parts[host].receives:
            host, var = self._senders[self._parts[host].receives[var]]
        return HostVar(host, var)

    def _keep_own_values(self) -> None:
        """Replace received values by the host's own variable if they were computed there."""
        for host, part in self._parts.items():
            for var in list(part.receives):
                source, original = self._origin(host, var)
                if source == host:
                    part.keep(var, original)
        self._senders = {c: (host, var) for host, part in self._parts.items() for c, var in part.sends.items()}

    def _find_levels(self) -> None:
        """Find the level of every binding, until no host makes progress."""
        waiting = {host: list(part.bindings) for host, part in self._parts.items()}
        last = dict.fromkeys(waiting, 0)
        has_progress = True
        while has_progress:
            has_progress = False
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
                has_progress = has_progress or done > 0
                waiting[host] = bindings[done:]
        stuck = {host: bindings[0].var.name for host, bindings in waiting.items() if bindings}
        if stuck:
            raise BuildError(f"function {self._name!r}: hosts wait for each other, at {stuck}")

    def _level(self, host: str, binding: relax.Binding) -> int | None:
        """Level of a binding; None if that of an operand is not known yet."""
        level = 0
        for var in self._parts[host].reads(binding):
            source, original = self._origin(host, var)
            if original in self._parts[source].params or HostVar(source, original) not in self._bound:
                continue
            operand_level = self._levels.get(HostVar(source, original))
            if operand_level is None:
                return None
            level = max(level, operand_level + (source != host))
        return level

    def _join_steps(self) -> None:
        """Join steps that send nothing with the next one of their host."""
        sending = {
            (source, self._levels[HostVar(source, original)])
            for host, part in self._parts.items()
            for source, original in (
                self._origin(host, var) for binding in part.bindings for var in part.reads(binding)
            )
            if source != host and HostVar(source, original) in self._levels
        }
        for host, part in self._parts.items():
            levels = sorted({self._levels[HostVar(host, b.var)] for b in part.bindings if b.var not in part.free})
            joined: dict[int, int] = {}
            next_level = None
            for level in reversed(levels):
                next_level = joined[level] = level if next_level is None or (host, level) in sending else next_level
            for binding in part.bindings:
                level = self._levels[HostVar(host, binding.var)]
                self._levels[HostVar(host, binding.var)] = joined.get(level, level)

    def _key(self, host: str, var: relax.Var) -> Key:
        return self._levels[HostVar(host, var)], host

    def _closure(self, key: Key) -> tuple[list[relax.Binding], list[relax.Var]]:
        """Bindings of a step, including the free ones that it needs, and the variables that it reads from outside."""
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

    def _returned(self) -> set[HostVar]:
        """Values that steps return, for other steps or the caller."""
        returned = {self._origin(host, var) for host, var in self._leaves(self._result)}
        for key in self._keys:
            returned |= {self._origin(key[1], var) for var in self._closure(key)[1]}
        return returned

    def _add_step(self, key: Key) -> None:
        host = key[1]
        bindings, reads = self._closure(key)
        function = f"{self._name}_{len(self._cut.functions[host])}"
        func, sizes = step_function(bindings, reads, self._step_results[key], is_pure=not self._parts[host].in_order)
        arguments = [self._source(host, var) for var in reads]
        if sizes:
            arguments.append(self._size_input(sizes))
        self._cut.functions[host][function] = func.with_attr("global_symbol", function)
        self._cut.steps.append(HostStep(host, function, tuple(arguments), len(self._step_results[key])))

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
        return Source(self._keys.index(key), self._step_results[key].index(var))

    def _locate_result(self, results: Sequence[relax.Expr]) -> Any:
        """Replace each leaf of the result by a variable of the host that has it."""
        if isinstance(results[0], relax.Tuple):
            return tuple(
                self._locate_result([each.fields[i] for each in results]) for i in range(len(results[0].fields))
            )
        for (host, part), value in zip(self._parts.items(), results, strict=True):
            if isinstance(value.ty, relax.ShapeType) and int(value.ty.ndim) == 0:
                continue  # on another host
            return HostVar(host, part.variable_of(value))
        return ()

    def _leaves(self, result: Any) -> list[HostVar]:
        if isinstance(result, HostVar):
            return [result]
        return [leaf for each in result for leaf in self._leaves(each)]

    def _sources(self, result: Any) -> Any:
        return self._source(*result) if isinstance(result, HostVar) else tuple(map(self._sources, result))


def plan_of_runs(
    signature: FunctionSignature, parts: Mapping[str, tuple[tvm.ir.GlobalVar, relax.Function]], inputs: int
) -> CallPlan:
    """Make the plan of a function that cannot be cut: hosts run their whole parts and exchange messages.

    `signature`: inputs and results of the function; `parts`: part of each host; `inputs`: number of inputs of the
    function, tuples flattened.
    """
    runs: list[HostRun] = []
    sizes: list[tuple[str, ...]] = []
    for host, (gv, func) in parts.items():
        params, arguments = list(func.params), []
        if SIZES_FIRST in func.attrs:
            arguments.append(Source(CALL, inputs + len(sizes)))
            sizes.append(tuple(str(symbol.name) for symbol in params.pop(0).ty.values))
        indices = iter(range(inputs))
        arguments += [_argument(param.ty, indices) for param in params]
        runs.append(HostRun(host, gv.name_hint, tuple(arguments)))
    result = _result([func.ret_ty for _, func in parts.values()], iter(range(1 << 30)))
    return CallPlan((), result, signature=signature, sizes=tuple(sizes), runs=tuple(runs))


def _argument(ty: tvm.ir.Type, indices: Iterator[int]) -> Any:
    if isinstance(ty, tvm.ir.TupleType):
        return tuple(_argument(field, indices) for field in ty.fields)
    index = next(indices)
    return None if _is_placeholder(ty) else Source(CALL, index)


def _result(types: Sequence[tvm.ir.Type], indices: Iterator[int]) -> Any:
    """Source of each leaf of the result: the first run that has it."""
    if isinstance(types[0], tvm.ir.TupleType):
        return tuple(_result([ty.fields[i] for ty in types], indices) for i in range(len(types[0].fields)))
    index = next(indices)
    return next((Source(run, index) for run, ty in enumerate(types) if not _is_placeholder(ty)), ())


def _is_placeholder(ty: tvm.ir.Type) -> bool:
    """Return whether a type (an empty shape) stands for a value of another host."""
    return isinstance(ty, relax.ShapeType) and int(ty.ndim) == 0


Hardware: TypeAlias = "tuple[str, int]"  # kind of a device, and its index on its host


def native_hardware(mod: tvm.IRModule) -> dict[str, list[Hardware]]:
    """Devices of a module without a full target, which stand for the hardware of their host, by host."""
    hardware: dict[str, list[Hardware]] = {}
    for vdevice in vdevices_of(mod):
        host = host_of(vdevice)
        if host is not None and is_native(vdevice.target):
            hardware.setdefault(host, []).append((str(vdevice.target.kind.name), int(vdevice.vdevice_id)))
    return hardware


def cut_module(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    # Targets of each host's hardware, for vdevices without a full target.
    natives: Mapping[str, Mapping[Hardware, Target]] | None = None,
    progress: Progress | None = None,
) -> Program:
    """Cut a module over hosts into a program.

    Arguments without a comment are as for `rh.compile`; every vdevice is on a host. Raises HeteroError if a vdevice has
    no host, or a host lacks a device; otherwise as for `rh.compile`.
    """
    if isinstance(mod, tvm.IRModule) and natives is not None:
        mod = with_natives(mod, natives)
    mod = prepare_module(mod, params, None, "default", accuracy, "rh.cluster")
    mod = bind_defaults(mod)  # hosts have constants, but no defaults of parameters
    mod = without_donated(mod)  # arguments are copies, or read-only memory of Ray
    hosts = hosts_of(vdevices_of(mod))
    mod = run_steps(mod, steps_before_hosts(), progress)
    signatures = signatures_before_lowering(mod)
    return program_of_parts(partition_by_host(mod), hosts, signatures)


def program_of_parts(mod: tvm.IRModule, hosts: Sequence[str], signatures: Mapping[str, FunctionSignature]) -> Program:
    """Make the program of a module that `PartitionByHost` has cut.

    `mod`: module with a part of each function for each host; `hosts`: logical names of the hosts; `signatures`:
    signatures of the functions before they were cut.
    """
    functions: dict[str, dict[str, relax.Function]] = {host: {} for host in hosts}
    plans = {}
    for name, signature in signatures.items():
        by_host = {
            str(func.attrs[HOST]): (gv, func) for gv, func in relax_functions(mod) if func.attrs.get(PART_OF) == name
        }
        parts = {host: by_host[host] for host in hosts if host in by_host}
        first = next(iter(parts.values()))[1]
        params = list(first.params)[1 if SIZES_FIRST in first.attrs else 0 :]
        inputs = sum(1 for param in params for _ in leaves_of(param.ty))
        if any(exchanges_inside(mod, func) for _, func in parts.values()):
            plans[name] = plan_of_runs(signature, parts, inputs)
            for host, (gv, func) in parts.items():
                functions[host][gv.name_hint] = func
            continue
        cut = cut_steps(name, {host: read_part(mod, host, func) for host, (_, func) in parts.items()}, inputs)
        for host, steps in cut.functions.items():
            functions[host] |= steps
        plans[name] = CallPlan(tuple(cut.steps), cut.result, signature=signature, sizes=tuple(cut.sizes))
    modules = {host: _module_of(mod, host, functions[host]) for host in hosts if functions[host]}
    return Program(modules, plans)


def with_natives(mod: tvm.IRModule, natives: Mapping[str, Mapping[Hardware, Target]]) -> tvm.IRModule:
    """Give vdevices without a full target the target of their host's hardware."""
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
        is_same = target.same_as(vdevice.target)
        new.append(
            vdevice if is_same else tvm.relax.VDevice(target, int(vdevice.vdevice_id), str(vdevice.memory_scope))
        )
    return succeed_vdevices(mod, new, new)


def _module_of(mod: tvm.IRModule, host: str, steps: Mapping[str, relax.Function]) -> tvm.IRModule:
    """Make the module of one host: its steps and all functions that they call."""
    existing = {gv.name_hint: gv for gv, func in mod.functions.items() if gv.name_hint in steps}  # others may call them
    table: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {
        existing.get(name) or typed(tvm.ir.GlobalVar(name), func.ty): func for name, func in steps.items()
    }
    pending = list(table.values())
    while pending:
        func = pending.pop()
        for gv in global_vars_in(func.body):
            if gv not in table:
                table[gv] = mod.functions[gv]
                pending.append(mod.functions[gv])
    host_mod = tvm.IRModule(table, attrs=mod.attrs, global_infos=mod.global_infos)
    old = vdevices_of(mod)
    own = [VDevice(on_host(v.target, None), int(v.vdevice_id), str(v.memory_scope)) for v in old if host_of(v) == host]
    replacements = iter(own)
    # No function of this module uses vdevices of other hosts.
    return succeed_vdevices(host_mod, [next(replacements) if host_of(v) == host else own[0] for v in old], own)
