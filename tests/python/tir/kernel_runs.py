"""Build PrimFuncs for several CPUs, with inputs and outputs that reveal wrong accesses of kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from arm.emulated_cpu import VARIABLE, install
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression, Term
from relax_hetero.encoding.winograd import positions
from relax_hetero.target.cpu_target import CpuTarget, cpu_target_of
from relax_hetero.target.element_types import numpy_dtype

_X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
_ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
TARGETS = {
    "avx512": {**_X86, "mcpu": "x86-64-v4", "num-cores": 2},
    "avx2": {**_X86, "mcpu": "x86-64-v3", "num-cores": 2},
    "sse": {**_X86, "mcpu": "x86-64"},
    "i8mm": {**_ARM, "mcpu": "neoverse-v2", "num-cores": 2},
    "dotprod": {**_ARM, "mcpu": "neoverse-n1", "num-cores": 2},
    "neon": {**_ARM, "mcpu": "cortex-a72"},
    "c": {"kind": "c"},
}


# Expressions that find vector instructions, and calls, in assembly.
VECTOR_INSTRUCTION = {
    "avx512": r"%zmm",
    "avx2": r"%ymm",
    "sse": r"(mul|div)ps",
    **dict.fromkeys(("i8mm", "dotprod", "neon"), r"v\d+\.4s"),
}
CALL = r"\b(?:callq?|bl)\s+(\w+)"

# Architecture of the CPU that runs kernels for named CPUs: this one's, or the emulated one's.
IS_EMULATED = VARIABLE in os.environ
HOST_ARCH = "aarch64" if IS_EMULATED else str(tvm.target.codegen.llvm_get_system_triple()).partition("-")[0]
if IS_EMULATED:
    install()

# Machines whose instructions multiply bytes or halves.
LOW_PRECISION_TARGETS = {
    "vnni": {**_X86, "mcpu": "znver5", "num-cores": 2},
    "avxvnni": {**_X86, "mcpu": "alderlake", "num-cores": 2},
    "sse4": {**_X86, "mcpu": "x86-64-v2", "num-cores": 2},
    # Dot products of bytes without other instructions for bytes.
    "early_vnni": {**_X86, "mcpu": "cascadelake", "num-cores": 2},
}
_EXTENSIONS = {
    "vnni": {"avx512vnni", "avx512bf16"},
    "avxvnni": {"avxvnni"},
    "sse4": {"sse4.2"},
    "early_vnni": {"avx512vnni"},
    "i8mm": {"i8mm", "bf16", "sve2"},
    "dotprod": {"dotprod", "fullfp16"},
}


def target_of(name: str) -> tvm.target.Target:
    return tvm.target.Target({**TARGETS, **LOW_PRECISION_TARGETS}[name])


def cpu_named(name: str) -> CpuTarget:
    return cpu_target_of(target_of(name))


def runs_here(name: str) -> bool:
    if target_of(name).kind.name == "c":
        return not IS_EMULATED
    if not str(target_of(name).attrs["mtriple"]).startswith(HOST_ARCH):
        return False
    if IS_EMULATED:
        return True
    host = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    present = {str(feature) for feature, has in host.items() if has}
    return set(cpu_named(name).isa.features) | _EXTENSIONS.get(name, set()) <= present


NAMES = [name for name in TARGETS if runs_here(name)]
VECTOR_NAMES = [name for name in NAMES if name != "c"]


def built(functions: dict[str, tirx.PrimFunc], name: str, folder: Path) -> Any:
    """A module with functions for a target, loaded."""
    module = tvm.IRModule({key: f.with_attr("global_symbol", key) for key, f in functions.items()})
    executable = tvm.compile(module, target=target_of(name))
    if name != "c":
        return executable
    path = folder / "kernels.so"
    executable.export_library(str(path))
    return tvm.runtime.load_module(str(path))


def assembly(function: tirx.PrimFunc, name: str) -> str:
    module = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=target_of(name)).mod.inspect_source("asm")


def kernel(function: tirx.PrimFunc, name: str, folder: Path) -> Callable[..., None]:
    return built({"kernel": function}, name, folder)["kernel"]


def random_bits(shape: Sequence[int], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Any bits at all: NaN payloads and denormals included."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


def poisoned(shape: Sequence[int], dtype: str) -> tvm.runtime.Tensor:
    """An output that shows every element that is not written."""
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return tvm.runtime.tensor(np.full(size, 0xAB, np.uint8).view(kind).reshape(shape))


def stored(array: np.ndarray, layout: PackedLayout, padding: int = 0xFF) -> np.ndarray:
    """`array` as `layout` stores it, every byte of padding as given: 0xFF is NaN."""
    packed = layout.pack(array)
    shape = [positions(layout.winograd) if d in layout.window_dims else size for d, size in enumerate(array.shape)]
    plain = replace(layout, winograd=0)
    real = plain.pack(np.ones(shape, f"uint{8 * array.dtype.itemsize}")).reshape(-1) != 0
    raw = packed.reshape(-1).view(np.uint8).reshape(packed.size, array.dtype.itemsize)
    raw[~real] = padding
    return packed


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def in_double(expression: Expression, values: Sequence[np.ndarray]) -> np.ndarray:
    """The value of an expression in float64, which no cast rounds."""

    def apply(op: str, args: list[Term], params: tuple[Any, ...]) -> Term:
        return args[0] if op == "cast" else Term(op, tuple(args), params)

    operands = [Expression.operand(index).term for index in range(len(values))]
    return Expression(expression.fold(operands, apply)).evaluate([value.astype("float64") for value in values])
