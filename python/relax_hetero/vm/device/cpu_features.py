"""Checks that this CPU has the instruction sets that code was compiled for: an error instead of a crash."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import replace

from tvm.base import _RUNTIME_ONLY

from ...artifact.metadata import CPU, DeviceSpec
from ...errors import BindingError

# LLVM's feature names that its code generator uses by itself -> Linux's names in /proc/cpuinfo.
_LINUX_NAMES: dict[str, str] = {
    **{name: name for name in ("ssse3", "popcnt", "avx", "avx2", "fma", "f16c", "bmi2", "movbe")},
    **{name: name for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi")},
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "neon": "asimd",
    "dotprod": "asimddp",
    "fullfp16": "asimdhp",
    **{name: name for name in ("sve", "sve2", "i8mm", "bf16", "sve-256-bits", "sve-512-bits")},
}

_SVE_LENGTH = re.compile(r"sve-(\d+)-bits")
_PR_SVE_GET_VL, _VL_MASK = 51, 0xFFFF  # Linux's prctl(2)


def with_features(spec: DeviceSpec) -> DeviceSpec:
    """`spec` with the instruction sets that its code may use, if LLVM is available; otherwise unchanged."""
    if spec.cpu_features is not None or spec.kind != "llvm" or _RUNTIME_ONLY:
        return spec
    return replace(spec, cpu_features=_llvm_features(spec.target))


@functools.cache
def _llvm_features(target: str) -> tuple[str, ...]:
    from tvm.target import Target, codegen

    from ...target.cpu_target import cpu_target_of

    sve_bytes = cpu_target_of(Target(target)).sve_bytes
    names = {str(name) for name in codegen.llvm_get_cpu_features(Target(target))}
    return tuple(sorted(names | ({_sve_length(sve_bytes)} if sve_bytes else set())))


def sve_bytes(spec: DeviceSpec) -> int:
    """Bytes of the vectors of SVE that code for `spec` needs; 0 for code of any length, and without LLVM."""
    matches = map(_SVE_LENGTH.fullmatch, with_features(spec).cpu_features or ())
    return next((int(match[1]) // 8 for match in matches if match), 0)


def _sve_length(vector_bytes: int) -> str:
    """Name of the length of SVE's vectors, among features."""
    return f"sve-{8 * vector_bytes}-bits"


@functools.cache
def linux_features() -> frozenset[str]:
    """The features of this CPU by Linux's names, and the length of SVE's vectors; empty if Linux does not list them."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    names = frozenset(value.split())
                    return names | {_sve_length(_sve_bytes())} if "sve" in names else names
    except OSError:
        pass
    return frozenset()


def _sve_bytes() -> int:
    """Bytes of a vector of SVE in this process."""
    return int(ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)) & _VL_MASK


def check_cpu(name: str, spec: DeviceSpec) -> None:
    """BindingError if code for `spec` (called `name`) may use instructions that this CPU lacks."""
    if spec.device_type != CPU or not linux_features():
        return
    features = [name for name in with_features(spec).cpu_features or () if name in _LINUX_NAMES]
    missing = sorted(name for name in features if _LINUX_NAMES[name] not in linux_features())
    if missing:
        raise BindingError(
            f"{name} was compiled for a CPU with {', '.join(missing)}, which this one lacks: {spec.target}"
        )
