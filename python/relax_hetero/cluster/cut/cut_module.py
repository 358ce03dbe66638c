"""A module whose vdevices are on several hosts becomes a program: a module for each host, and plans of calls.

The module goes through the pipeline as a whole up to its kernels, so that tensors cross in the layout of their
receiver. Then `PartitionByHost` cuts its functions, `host_steps` cuts the parts into steps, and each host gets a module
with its steps, its kernels and its weights alone, on vdevices without a host. The host compiles it, from command
buffers on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax
from tvm.target import Target

from ...artifact.signature import FunctionSignature
from ...driver.bind_params import bind_defaults
from ...driver.compile import prepared, run_steps
from ...driver.link.parallel_codegen import Progress
from ...driver.signatures import signatures_before_lowering
from ...errors import BuildError
from ...target.hosts import host_of, hosts_of, is_native, on_host
from ...target.make_vdevice import VDevice
from ...target.vdevice import vdevices_of
from ...transform.ir.rewriting import global_vars_in, relax_functions, typed
from ...transform.partition.host_needs import leaves_of
from ...transform.partition.partition_by_host import HOST, PART_OF, SIZES_FIRST, partition_by_host
from ...transform.pipeline import steps_before_hosts
from ...transform.placement.update_vdevice import succeed_vdevices
from ...transform.record.donated import without_donated
from ..call_plan import CALL, CallPlan, HostRun, Program, Source
from .host_parts import exchanges_inside, read_part
from .host_steps import cut_steps

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
    mod = prepared(mod, params, None, "default", accuracy, "rh.cluster")
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
