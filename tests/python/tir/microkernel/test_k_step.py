"""Inner products: every row of the table gives the right numbers, or at least the right instructions."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import (
    DOT_INSTRUCTIONS,
    SIGN_INSTRUCTIONS,
    SMALL_CODE_INSTRUCTIONS,
    DotInstruction,
    dot_instruction_for,
    widened_instruction,
)
from relax_hetero.tir.core.builder import Function, Registers, lane_indices, loop
from relax_hetero.tir.microkernel.k_step import FORMS, emit_step, lhs_group, llvm_import, rhs_groups, zero

TARGETS = {
    "avx512": {"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["+avx512vnni", "+avx512bf16"]},
    "avx512 base": {"kind": "llvm", "mcpu": "x86-64-v4"},
    "avx2 vnni": {"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+avxvnni"]},
    "avx2": {"kind": "llvm", "mcpu": "x86-64-v3"},
    "sse": {"kind": "llvm", "mcpu": "x86-64"},
    "c": {"kind": "c"},
}
AARCH64 = {
    "neon": ["+neon"],
    "dotprod": ["+neon", "+dotprod"],
    "armv8.6": ["+neon", "+dotprod", "+i8mm", "+bf16"],
}
TYPES = sorted({dot.types for dot in DOT_INSTRUCTIONS})
ROWS = 3


def _runs_here(target: tvm.target.Target) -> bool:
    if target.kind.name == "c":
        return True
    if not str(tvm.target.codegen.llvm_get_system_triple()).startswith("x86_64"):
        return False
    host = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    present = {str(name) for name, has in host.items() if has}
    needed = {"avx512f", "avx512bw", "avx512vnni", "avx512bf16", "avxvnni", "avx2", "fma", "f16c"}
    return cpu_target_of(target).features & needed <= present


def _kernel(dot: DotInstruction, lanes: int, k: int, vectors: int) -> tirx.PrimFunc:
    """ROWS rows by `vectors` vectors of columns; left operand row-major, right one ``[vectors, k/k0, lanes, k0]``."""
    lhs, rhs, acc = dot.types
    k0, steps = dot.k0, -(-k // dot.k0)
    with Function("product") as function:
        a = function.argument("a", (ROWS, k), lhs)
        b = function.argument("b", (vectors, steps, lanes * k0), rhs)
        c = function.argument("c", (ROWS, vectors * lanes), acc)

        def step(sums: Registers, v: object, position: object, groups: list) -> None:
            factors = T.bind(rhs_groups(dot, b[v, position, lane_indices(tirx.const(0, "int64"), lanes * k0)], lanes))
            for row in range(ROWS):
                sums[row] = emit_step(dot, sums[row], T.bind(lhs_group(dot, groups[row])), factors, lanes)

        def body() -> None:
            with loop(vectors) as vector:
                sums = Registers(ROWS, acc, lanes)
                for row in range(ROWS):
                    sums[row] = zero(dot, lanes)
                with loop(k // k0) as position:
                    step(sums, vector, position, [a[row, lane_indices(position * k0, k0)] for row in range(ROWS)])
                if k % k0:
                    last = k // k0
                    beyond = [tirx.const(0, lhs)] * (k0 - k % k0)
                    rest = [[a[row, i] for i in range(last * k0, k)] + beyond for row in range(ROWS)]
                    step(sums, vector, last, rest)
                for row in range(ROWS):
                    T.buffer_store(c, sums[row], [row, lane_indices(vector * lanes, lanes)])

        with function.body():
            text = llvm_import(dot, lanes)
            if text is None:
                body()
            else:
                with T.attr(0, "pragma_import_llvm", text):
                    body()
    return function.result


def _compile(dot: DotInstruction, target: tvm.target.Target, k: int = 37, vectors: int = 2) -> tvm.runtime.Executable:
    lanes = cpu_target_of(target).lanes(dot.types[2])
    return tvm.compile(tvm.IRModule({"product": _kernel(dot, lanes, k, vectors)}), target=target)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if "int" in dtype:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
        values.flat[:: max(1, values.size // 7)] = limits.min
        values.flat[1 :: max(1, values.size // 7)] = limits.max
        return values
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _packed(rhs: np.ndarray, lanes: int, k0: int) -> np.ndarray:
    k, n = rhs.shape
    padded = np.pad(rhs, [(0, -k % k0), (0, 0)])
    tiles = padded.reshape(padded.shape[0] // k0, k0, n // lanes, lanes).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(tiles).reshape(n // lanes, -1, lanes * k0)


def _run(executable: tvm.runtime.Executable, arrays: list[np.ndarray], path) -> np.ndarray:
    module = executable
    if executable.mod.kind == "c":
        library = str(path / "product.so")
        executable.export_library(library, options=["-O1", "-fno-strict-aliasing", "-Dhalf=_Float16"])
        module = tvm.runtime.load_module(library)
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    module["product"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("name", TARGETS)
def test_numbers(name, types, tmp_path):
    target = tvm.target.Target(TARGETS[name])
    if not _runs_here(target):
        pytest.skip("another machine's instructions")
    cpu, (k, vectors) = cpu_target_of(target), (37, 2)
    dot = dot_instruction_for(cpu, *types)
    lanes = cpu.lanes(types[2])
    rng = np.random.default_rng([ord(letter) for letter in name + "".join(types)])
    lhs, rhs = _random(rng, (ROWS, k), types[0]), _random(rng, (k, vectors * lanes), types[1])
    poison = np.full((ROWS, vectors * lanes), np.nan if "float" in types[2] else 0x5B, types[2])
    actual = _run(_compile(dot, target, k, vectors), [lhs, _packed(rhs, lanes, dot.k0), poison], tmp_path)
    if "int" in types[2]:
        actual = actual + (dot.compensation * -128 * rhs.astype("int64").sum(axis=0)).astype(types[2])
        np.testing.assert_array_equal(actual, lhs.astype(types[2]) @ rhs.astype(types[2]))
    else:
        expected = lhs.astype("float64") @ rhs.astype("float64")
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.sqrt(k), rtol=0)


@pytest.mark.parametrize("name", ["avx2", "sse", "c"])
def test_special_float16_values(name, tmp_path):
    target = tvm.target.Target(TARGETS[name])
    if not _runs_here(target):
        pytest.skip("another machine's instructions")
    dot = dot_instruction_for(cpu_target_of(target), "float16", "float16", "float32")
    lanes = cpu_target_of(target).lanes("float32")
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 6e-8, -6e-5, 65504.0, -1.5], "float16")
    rhs = np.resize(values, (1, 8 * lanes))
    actual = _run(
        _compile(dot, target, 1, 8),
        [np.array([[1], [-1], [0]], "float16"), _packed(rhs, lanes, 1), np.zeros((ROWS, 8 * lanes), "float32")],
        tmp_path,
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(actual, np.array([[1], [-1], [0]], "float32") * rhs.astype("float32"))


@pytest.mark.parametrize("types", [t for t in TYPES if t[0] == "bfloat16"], ids="-".join)
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "c"])
def test_a_nan_stays_in_its_row_and_column(name, types, tmp_path):
    target = tvm.target.Target(TARGETS[name])
    if not _runs_here(target):
        pytest.skip("another machine's instructions")
    dot = dot_instruction_for(cpu_target_of(target), *types)
    lanes = cpu_target_of(target).lanes(types[2])
    lhs, rhs = np.ones((ROWS, 5), ml_dtypes.bfloat16), np.ones((5, lanes), ml_dtypes.bfloat16)
    lhs[1, 0], rhs[2, 3] = np.nan, np.inf
    actual = _run(
        _compile(dot, target, 5, 1),
        [lhs, _packed(rhs, lanes, dot.k0), np.zeros((ROWS, lanes), "float32")],
        tmp_path,
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(actual, lhs.astype("float32") @ rhs.astype("float32"))


INSTRUCTIONS = [
    ("avx512", ("float32", "float32", "float32"), r"vfmadd\d+ps.*zmm"),
    ("avx512", ("uint8", "int8", "int32"), r"vpdpbusd\s.*zmm"),
    ("avx512", ("int8", "int8", "int32"), r"vpdpbusd\s.*zmm"),
    ("avx512", ("bfloat16", "bfloat16", "float32"), r"vdpbf16ps\s.*zmm"),
    ("avx512", ("float16", "float16", "float32"), r"vcvtph2ps\s.*zmm"),
    ("avx512 base", ("uint8", "int8", "int32"), r"vpmaddwd\s.*zmm"),
    ("avx2 vnni", ("int8", "uint8", "int32"), r"vpdpbusd\s.*ymm"),
    ("avx2", ("float64", "float64", "float64"), r"vfmadd\d+pd.*ymm"),
    ("avx2", ("int8", "int8", "int32"), r"vpmaddwd\s.*ymm"),
    ("sse", ("uint8", "uint8", "int32"), r"pmaddwd\s.*xmm"),
    ("neon", ("float32", "float32", "float32"), r"fmla\s.*4s"),
    ("neon", ("int8", "int8", "int32"), r"mla\s.*4s"),
    ("neon", ("float16", "float16", "float32"), r"fcvtl\s.*4s"),
    ("dotprod", ("int8", "int8", "int32"), r"sdot\s.*16b"),
    ("dotprod", ("uint8", "uint8", "int32"), r"udot\s.*16b"),
    ("dotprod", ("uint8", "int8", "int32"), r"sdot\s.*16b"),
    ("armv8.6", ("bfloat16", "bfloat16", "float32"), r"bfdot\s.*8h"),
]


@pytest.mark.parametrize("name, types, instruction", INSTRUCTIONS)
def test_instructions(name, types, instruction):
    arm = AARCH64.get(name)
    config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": arm} if arm else TARGETS[name]
    if not arm:
        config = {"mtriple": "x86_64-linux-gnu", **config}
    target = tvm.target.Target(config)
    dot = dot_instruction_for(cpu_target_of(target), *types, by_rows=True)
    assembly = _compile(dot, target, 64).mod.inspect_source("asm")
    assert len(re.findall(rf"\s{instruction}", assembly)) >= 2, assembly


def test_a_group_of_four_bytes_is_one_broadcast_from_memory():
    target = tvm.target.Target({"mtriple": "x86_64-linux-gnu", **TARGETS["avx512"]})
    dot = dot_instruction_for(cpu_target_of(target), "uint8", "int8", "int32")
    assembly = _compile(dot, target, 64).mod.inspect_source("asm")
    assert re.search(r"vpbroadcastd\s+-?\d*\(%r\w+", assembly) or re.search(r"\{1to16\}", assembly), assembly
    assert not re.search(r"vpinsrb|vpshufb|movzb", assembly)


def test_two_kernels_of_one_module_import_the_same_function(tmp_path):
    target = tvm.target.Target(TARGETS["avx512"])
    dot = dot_instruction_for(cpu_target_of(target), "bfloat16", "bfloat16", "float32")
    kernels = {name: _kernel(dot, 16, 4, 1).with_attr("global_symbol", name) for name in ("one", "two")}
    executable = tvm.compile(tvm.IRModule(kernels), target=target)
    if not _runs_here(target):
        pytest.skip("another machine's instructions")
    lhs, rhs = np.ones((ROWS, 4), ml_dtypes.bfloat16), np.ones((4, 16), ml_dtypes.bfloat16)
    for name in kernels:
        result = tvm.runtime.tensor(np.zeros((ROWS, 16), "float32"))
        executable[name](tvm.runtime.tensor(lhs), tvm.runtime.tensor(_packed(rhs, 16, 2)), result)
        np.testing.assert_array_equal(result.numpy(), np.full((ROWS, 16), 4, "float32"))


def test_unknown_types_have_no_product():
    cpu = cpu_target_of(tvm.target.Target(TARGETS["avx512"]))
    assert dot_instruction_for(cpu, "float32", "int8", "float32") is None
    assert dot_instruction_for(cpu, "float8_e4m3fn", "float8_e4m3fn", "float32") is None


def test_every_row_names_a_form():
    wide = [widened_instruction(dot) for dot in DOT_INSTRUCTIONS if dot.short]
    rows = (*DOT_INSTRUCTIONS, *SMALL_CODE_INSTRUCTIONS, *SIGN_INSTRUCTIONS, *wide)
    assert {dot.form for dot in rows} == set(FORMS)
    assert all((dot.compensation != 0) == dot.flip for dot in DOT_INSTRUCTIONS)
