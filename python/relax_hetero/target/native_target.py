"""Targets for the hardware this process runs on.

TVM's own defaults are generic: ``Target("llvm")`` compiles for the oldest CPU of its architecture, and a CUDA
target without ``arch`` is sm_50. The functions here ask LLVM, the CUDA driver and the operating system instead.
"""

from __future__ import annotations

import difflib
import re
from functools import cache

import tvm
import tvm_ffi
from tvm.target import Target, codegen

from ..errors import VDeviceError
from .backend import backend_of
from .cpu_cores import NUMA_NODE, cpus_of_nodes, num_cores
from .device_words import device_hint
from .hosts import host_of

# Names of architectures in triples that LLVM lists under another name.
_ARCH_ALIAS = re.compile(r"amd64|arm64\w*|i[4-9]86|x86_64h|(arm|thumb)v\w+|ppc\w*|(riscv|mips|sparc)\w+")

# Kinds that TVM lists but that name no device a tensor can live on.
_NOT_DEVICES = frozenset({"composite", "cuda_host", "test"})


def native(kind: str = "llvm", index: int = 0, numa: int | None = None) -> Target:
    """A target for the hardware of this very machine.

    Parameters
    ----------
    kind : str
        A target kind. "llvm" gives this CPU's name, its features beyond (or short of) what the name implies, and
        its core count; ``cuda`` the architecture and limits of a GPU (sm_90a on Hopper, which is also assumed where
        none is present); other kinds what TVM detects, or its defaults where the device is absent.
    index : int
        Which device of the kind is asked; meaningless for CPUs.
    numa : int, optional
        NUMA node for "llvm". The target is then the CPUs of that node: its cores are counted, work runs on them, and
        the device's memory comes from there.

    Returns
    -------
    target : tvm.target.Target
        Target with the attributes of the hardware here.

    Raises
    ------
    VDeviceError
        If `kind` is not a kind of target that a device can have, or a device of it has to be asked and is absent; if
        this process has no CPUs in the node `numa`, or `kind` has no nodes.
    """
    if kind not in device_kinds():
        hint = device_hint(kind, device_kinds()) if isinstance(kind, str) else ""
        if isinstance(kind, str) and kind.partition(":")[0] in device_kinds():
            hint = "; give the kind alone, and the number as index="
        raise VDeviceError(f"{kind!r} is not a target kind of a device{hint}; kinds are {', '.join(device_kinds())}")
    if numa is not None:
        return Target(_of_node(kind, numa))
    return backend_of(kind).native_target(index)


def with_hardware(vdevice: tvm.relax.VDevice) -> tvm.relax.VDevice:
    """The vdevice on the hardware of this machine, where its target says no more than the kind; else itself.

    TVM gives such a target, as in ``I.vdevice("llvm")``, the oldest CPU of this architecture, or the GPU it guesses. A
    CPU's target is complete with ``mcpu`` or ``mattr`` (``{"kind": "llvm", "mcpu": "generic"}`` is the oldest), or with
    another triple than this machine's; a CUDA one where anything in it differs from what TVM guesses.
    """
    target, index = vdevice.target, int(vdevice.vdevice_id)
    made = None if host_of(target) is not None else backend_of(target).completed(target, index)
    if made is None:
        return vdevice
    made = made.with_host(target.host) if target.host is not None else made
    return tvm.relax.VDevice(made, index, str(vdevice.memory_scope))


def completed_llvm(target: Target) -> Target | None:
    """Target of this CPU with the attributes of a given one that has neither CPU nor features; else None."""
    attrs = target.attrs
    if attrs.keys() & {"mcpu", "mattr"} or attrs.get("mtriple") != default_target("llvm").attrs["mtriple"]:
        return None
    own = {name: value for name, value in target.export().items() if name not in ("mtriple", "host")}
    return Target({**_native_llvm(), **own})


def check_cpu_names(target: Target) -> None:
    """Refuse an ``mtriple`` or ``mcpu`` that LLVM does not know.

    TVM crashes for the first, and for the second compiles for the oldest CPU after a line on the error stream.

    Raises
    ------
    VDeviceError
        Names the nearest one that is known.
    """
    if str(target.kind.name) != "llvm":
        return
    triple = str(target.attrs.get("mtriple", "")) or str(default_target("llvm").attrs["mtriple"])
    arch = triple.partition("-")[0]
    known = [str(name) for name in codegen.llvm_get_targets()]
    if arch not in known and not _ARCH_ALIAS.fullmatch(arch):
        near = difflib.get_close_matches(arch, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it knows {', '.join(known)}"
        raise VDeviceError(f"mtriple {triple!r} begins with {arch!r}, which is no architecture of this LLVM{hint}")
    cpu, cpus = str(target.attrs.get("mcpu", "generic")), _cpus_of(triple)
    if cpus and cpu not in cpus and not _is_alias(cpu, triple):
        near = difflib.get_close_matches(cpu, cpus, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "rh.native('llvm') is this CPU, \"generic\" the oldest"
        raise VDeviceError(f"mcpu {cpu!r} is no CPU that LLVM knows for {triple!r}; {hint}")


def _is_alias(cpu: str, triple: str) -> bool:
    """True if LLVM knows a CPU that its list lacks, such as ``apple-m1``: it has more features than the generic one."""
    if cpu == str(codegen.llvm_get_system_cpu()):
        return True
    found, features = (
        {str(name) for name in codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mtriple": triple, "mcpu": name}))}
        for name in (cpu, "generic")
    )
    return not found <= features


@cache
def _cpus_of(triple: str) -> tuple[str, ...]:
    return tuple(str(name) for name in codegen.llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple})))


@cache
def default_target(kind: str) -> Target:
    """TVM's target for a kind alone, without the warning that it guesses where there is no GPU."""
    return backend_of(kind).default_target()


@cache
def device_kinds() -> tuple[str, ...]:
    """The target kinds a vdevice can have, in alphabetical order."""
    return tuple(sorted(str(kind) for kind in Target.list_kinds() if str(kind) not in _NOT_DEVICES))


def native_llvm() -> Target:
    """Target for this CPU."""
    return Target(_native_llvm())


@cache
def _native_llvm() -> dict[str, object]:
    cpu = str(codegen.llvm_get_system_cpu())
    config: dict[str, object] = {
        "kind": "llvm",
        "mtriple": str(codegen.llvm_get_system_triple()),
        "mcpu": cpu,
        "num-cores": num_cores(),
    }
    # A virtual machine may hide features that the CPU's name implies (using them would be an illegal
    # instruction), or have some that it does not (then LLVM's guess of the name was too old).
    host = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    present = {str(name) for name, has in host.items() if has}
    absent = {str(name) for name in host} - present
    implied = {str(name) for name in codegen.llvm_get_cpu_features(Target(config))}
    changes = [f"+{name}" for name in sorted(present - implied)] + [f"-{name}" for name in sorted(absent & implied)]
    if changes:
        config["mattr"] = changes
    return config


def _of_node(kind: str, node: int) -> dict[str, object]:
    nodes = cpus_of_nodes()
    if kind != "llvm" or type(node) is not int or node not in nodes:
        raise VDeviceError(
            f"{kind!r} with numa={node!r}: expected 'llvm' and a node on which this process may use CPUs: "
            f"{', '.join(map(str, nodes))}"
        )
    # TVM keeps the text in "model" and does nothing with it.
    return {**_native_llvm(), "num-cores": min(num_cores(), len(nodes[node])), "model": f"{NUMA_NODE}{node}"}
