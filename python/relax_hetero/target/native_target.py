"""Targets for the hardware of this computer.

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
from .cpu_cores import NUMA_NODE, UNLIKE_CORES, cpus_of_nodes, num_threads, tasks_per_thread
from .device_words import device_hint
from .hosts import host_of

# Names of architectures in triples that LLVM lists under another name.
_ARCH_ALIAS = re.compile(r"amd64|arm64\w*|i[4-9]86|x86_64h|(arm|thumb)v\w+|ppc\w*|(riscv|mips|sparc)\w+")

INSTRUCTION_LEVELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sse4": ("x86-64-v2", ()),
    "avx2": ("x86-64-v3", ()),
    "avx-vnni": ("x86-64-v3", ("avxvnni",)),
    "avx512": ("x86-64-v4", ()),
}
"""Values of ``native(isa=)``: LLVM's CPU of the instructions, and features besides."""

# Kinds that TVM lists but that name no device a tensor can live on.
_NOT_DEVICES = frozenset({"composite", "cuda_host", "test"})


def native(kind: str = "llvm", index: int = 0, numa: int | None = None, isa: str | None = None) -> Target:
    """A target for the hardware of this computer.

    Parameters
    ----------
    kind : str
        Target kind. "llvm" gives this CPU's name, its features that differ from those of the name, and its number of
        cores; ``cuda`` the architecture and limits of a GPU (sm_90a on Hopper, which is also the default without a
        GPU); other kinds what TVM detects, or TVM's defaults if the device is absent.
    index : int
        Index of the device of this kind; ignored for CPUs.
    numa : int, optional
        NUMA node for "llvm": the device then consists of that node's CPUs and memory.
    isa : str, optional
        Newest instructions of code for "llvm" on x86-64: "sse4", "avx2", "avx-vnni" or "avx512"; by default all that
        this CPU has. Code for older ones runs on more computers.

    Returns
    -------
    target : tvm.target.Target
        Target with the attributes of the hardware.

    Raises
    ------
    VDeviceError
        A `kind` that is not a device's, or whose device must be queried and is absent; a node `numa` without CPUs of
        this process, or instructions `isa` that this CPU lacks; either with another kind than "llvm".
    """
    if kind not in device_kinds():
        hint = device_hint(kind, device_kinds()) if isinstance(kind, str) else ""
        if isinstance(kind, str) and kind.partition(":")[0] in device_kinds():
            hint = "; give the kind alone, and the number as index="
        raise VDeviceError(f"{kind!r} is not a target kind of a device{hint}; kinds are {', '.join(device_kinds())}")
    if numa is None and isa is None:
        return backend_of(kind).native_target(index)
    config = _native_llvm() if numa is None else _numa_config(kind, numa)
    return Target(config if isa is None else _with_instructions(kind, config, isa))


def with_hardware(vdevice: tvm.relax.VDevice) -> tvm.relax.VDevice:
    """Complete a vdevice whose target specifies only the kind with the hardware of this computer.

    TVM makes such a target, as in ``I.vdevice("llvm")``, for the oldest CPU of this architecture, or for a guessed GPU.
    A CPU target is specific if it has ``mcpu`` or ``mattr`` (``{"kind": "llvm", "mcpu": "generic"}`` is the oldest CPU)
    or another triple; a CUDA target if anything in it differs from TVM's guess.
    """
    target, index = vdevice.target, int(vdevice.vdevice_id)
    completed = None if host_of(target) is not None else backend_of(target).completed(target, index)
    if completed is None:
        return vdevice
    completed = completed.with_host(target.host) if target.host is not None else completed
    return tvm.relax.VDevice(completed, index, str(vdevice.memory_scope))


def completed_llvm(target: Target) -> Target | None:
    """The target of this CPU with the attributes of `target`, if that specifies neither CPU nor features; else None."""
    attrs = target.attrs
    if attrs.keys() & {"mcpu", "mattr"} or attrs.get("mtriple") != default_target("llvm").attrs["mtriple"]:
        return None
    overrides = {name: value for name, value in target.export().items() if name not in ("mtriple", "host")}
    keys = {"keys": [*overrides["keys"], UNLIKE_CORES]} if tasks_per_thread() > 1 else {}
    return Target({**_native_llvm(), **overrides, **keys})


def check_cpu_names(target: Target) -> None:
    """Refuse an ``mtriple`` or ``mcpu`` that LLVM does not support.

    TVM crashes with the former, and with the latter compiles for the oldest CPU after printing a line. Raises
    VDeviceError for an unsupported name; the message suggests a similar one.
    """
    if str(target.kind.name) != "llvm":
        return
    triple = str(target.attrs.get("mtriple", "")) or str(default_target("llvm").attrs["mtriple"])
    arch = triple.partition("-")[0]
    architectures = [str(name) for name in codegen.llvm_get_targets()]
    if arch not in architectures and not _ARCH_ALIAS.fullmatch(arch):
        similar = difflib.get_close_matches(arch, architectures, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else f"; it knows {', '.join(architectures)}"
        raise VDeviceError(f"mtriple {triple!r} begins with {arch!r}, which is not an architecture of this LLVM{hint}")
    cpu, cpus = str(target.attrs.get("mcpu", "generic")), _cpus_of(triple)
    if cpus and cpu not in cpus and not _is_alias(cpu, triple):
        similar = difflib.get_close_matches(cpu, cpus, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else "rh.native('llvm') is this CPU, \"generic\" the oldest"
        raise VDeviceError(f"mcpu {cpu!r} is not a CPU that LLVM knows for {triple!r}; {hint}")


def _is_alias(cpu: str, triple: str) -> bool:
    """Return whether LLVM supports a CPU that its list lacks, such as ``apple-m1``, with more features than generic."""
    if cpu == str(codegen.llvm_get_system_cpu()):
        return True
    features_of_cpu, features = (
        {str(name) for name in codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mtriple": triple, "mcpu": name}))}
        for name in (cpu, "generic")
    )
    return not features_of_cpu <= features


@cache
def _cpus_of(triple: str) -> tuple[str, ...]:
    return tuple(str(name) for name in codegen.llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple})))


@cache
def default_target(kind: str) -> Target:
    """TVM's target for a kind, without TVM's warning that it guesses a GPU."""
    return backend_of(kind).default_target()


@cache
def device_kinds() -> tuple[str, ...]:
    """The target kinds of devices, in alphabetical order."""
    return tuple(sorted(str(kind) for kind in Target.list_kinds() if str(kind) not in _NOT_DEVICES))


def native_llvm() -> Target:
    """Target for this CPU."""
    return Target(_native_llvm())


def _with_instructions(kind: str, config: dict[str, object], isa: str) -> dict[str, object]:
    """The target of this CPU with the instructions of a row of `INSTRUCTION_LEVELS`."""
    mcpu, extra = INSTRUCTION_LEVELS.get(isa, ("", ()))
    arch = str(config["mtriple"]).partition("-")[0]
    if kind != "llvm" or not mcpu or arch != "x86_64":
        raise VDeviceError(
            f"{kind!r} with isa={isa!r} on {arch}: expected 'llvm' on x86_64 and one of {', '.join(INSTRUCTION_LEVELS)}"
        )
    older = {**{name: value for name, value in config.items() if name != "mattr"}, "mcpu": mcpu}
    if extra:
        older["mattr"] = [f"+{name}" for name in extra]
    _, absent = _host_features()
    if missing := sorted({str(name) for name in codegen.llvm_get_cpu_features(Target(older))} & absent):
        raise VDeviceError(f"isa={isa!r} needs {', '.join(missing)}, which this CPU lacks")
    return older


@cache
def _native_llvm() -> dict[str, object]:
    cpu = str(codegen.llvm_get_system_cpu())
    config: dict[str, object] = {
        "kind": "llvm",
        "mtriple": str(codegen.llvm_get_system_triple()),
        "mcpu": cpu,
        "num-cores": num_threads(),
    }
    if tasks_per_thread() > 1:
        config["keys"] = ["cpu", UNLIKE_CORES]
    # A virtual machine may hide features that the CPU's name implies, or, if LLVM's guess of the name is too old, have
    # additional ones.
    present, absent = _host_features()
    implied = {str(name) for name in codegen.llvm_get_cpu_features(Target(config))}
    changes = [f"+{name}" for name in sorted(present - implied)] + [f"-{name}" for name in sorted(absent & implied)]
    if changes:
        config["mattr"] = changes
    return config


def _host_features() -> tuple[set[str], set[str]]:
    """Features of this CPU by LLVM's names, and those that it lacks."""
    host = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    present = {str(name) for name, has in host.items() if has}
    return present, {str(name) for name in host} - present


def _numa_config(kind: str, node: int) -> dict[str, object]:
    nodes = cpus_of_nodes()
    if kind != "llvm" or type(node) is not int or node not in nodes:
        raise VDeviceError(
            f"{kind!r} with numa={node!r}: expected 'llvm' and a node on which this process may use CPUs: "
            f"{', '.join(map(str, nodes))}"
        )
    # TVM stores "model" without using it.
    return {**_native_llvm(), "num-cores": min(num_threads(), len(nodes[node])), "model": f"{NUMA_NODE}{node}"}
