"""Products by tile registers (Intel AMX): emulated here, and as machine code."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import tirx as T

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, RowPhase
from relax_hetero.encoding.row_program import RowProgram
from relax_hetero.target.amx_instructions import AMX_INSTRUCTIONS, amx_instruction_for
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.matmul.matmul import matmul_kernel
from relax_hetero.tir.microkernel.amx import LLVM_TEXT, may_use_amx
from seeds import fresh_rng
from tir.kernel_runs import runs_here
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512, SYMBOLS, assert_close, operand, plain_problem, random_array, run_stored
from tir.test_assembly import innermost_loops

pytestmark = pytest.mark.skipif(not runs_here("avx512"), reason="emulated tiles stand beside vectors of AVX-512")

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
TYPES = sorted(instruction.types for instruction in AMX_INSTRUCTIONS)
BF16, U8S8, S8S8 = ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"), ("int8", "int8", "int32")


def _run(problem: MatmulProblem, arrays: list[np.ndarray], shape: tuple[int, ...], by_tiles: bool = True) -> np.ndarray:
    """The result by emulated tiles; whether there were products of tiles must be `by_tiles`."""
    emulator()
    kernel = emulated(matmul_kernel(problem, cpu_target_of(XEON)))
    executable = tvm.compile(tvm.IRModule({"matmul": kernel}), target=AVX512)
    stored = [op.layout.pack(a) for op, a in zip(problem.parameters[:-1], arrays, strict=True)]
    before = products_so_far()
    got = run_stored(executable, problem, AVX512, stored, shape)
    assert (products_so_far() > before) == by_tiles
    return got


def _operands(sizes: tuple[int, int, int], types: tuple[str, str, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng, (m, k, n) = fresh_rng(), sizes
    a, b = random_array(rng, (m, k), types[0]), random_array(rng, (k, n), types[1])
    return a, b, a.astype("float64") @ b.astype("float64")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("sizes", [(33, 100, 40), (8, 64, 32), (150, 63, 17), (64, 128, 160), (32, 1700, 70)], ids=str)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_products_of_tiles(types, sizes):
    a, b, want = _operands(sizes, types)
    assert_close(_run(plain_problem(XEON, sizes, types), [a, b], want.shape), want, types[2], sizes[1])


@pytest.mark.parametrize("types", [BF16, U8S8], ids="-".join)
def test_blocks_of_k_and_prefetches(types):
    sizes = (70, 3500 if types == BF16 else 7000, 200)
    a, b, want = _operands(sizes, types)
    assert_close(_run(plain_problem(XEON, sizes, types), [a, b], want.shape), want, types[2], sizes[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("m", [4, 5, 17, 32, 33, 100])
@pytest.mark.parametrize("types", [BF16, S8S8], ids="-".join)
def test_symbolic_rows(types, m):
    sizes = (m, 200, 48)
    a, b, want = _operands(sizes, types)
    assert_close(_run(plain_problem(XEON, sizes, types, "m"), [a, b], want.shape), want, types[2], sizes[1])


@pytest.mark.parametrize("symbolic", ["", "m"])
def test_few_rows_are_left_to_vectors(symbolic):
    a, b, want = _operands((3, 64, 32), U8S8)
    got = _run(plain_problem(XEON, (3, 64, 32), U8S8, symbolic), [a, b], want.shape, by_tiles=False)
    np.testing.assert_array_equal(got, want)


def test_rows_that_two_tiles_share_are_finished_once():
    """A residual that is read in place of the result, of rows that do not divide among tiles."""
    sizes = (67, 96, 72)
    a, b, want = _operands(sizes, BF16)
    residual = operand((67, 72), "float32", "mn")
    problem = plain_problem(XEON, sizes, BF16, epilogue=Epilogue(Expression.parse("add(x0, x1)"), (residual,)))
    kernel = emulated(matmul_kernel(problem, cpu_target_of(XEON)))
    emulator()
    executable = tvm.compile(tvm.IRModule({"matmul": kernel}), target=AVX512)
    start = fresh_rng().standard_normal((67, 72)).astype("float32")
    memory = tvm.runtime.tensor(start)
    stored = [op.layout.pack(array) for op, array in zip(problem.parameters[:2], (a, b), strict=True)]
    executable["matmul"](*map(tvm.runtime.tensor, stored), memory, memory)
    assert_close(memory.numpy(), want + start, "float32", 96)


def test_without_permission_the_same_kernel_multiplies_by_vectors():
    a, b, want = _operands((40, 100, 70), S8S8)
    permission = ctypes.c_int.in_dll(emulator(), "tiles_permission")
    permission.value = 0
    try:
        got = _run(plain_problem(XEON, (40, 100, 70), S8S8), [a, b], want.shape, by_tiles=False)
    finally:
        permission.value = 1
    np.testing.assert_array_equal(got, want)


def test_compiled_code_asks_the_operating_system():
    function = Function("ask")
    with function:
        answer = function.argument("answer", [tvm.tirx.IntImm("int64", 1)], "int32")
        with function.body(), T.attr(0, "pragma_import_llvm", LLVM_TEXT):
            T.buffer_store(answer, tvm.tirx.Cast("int32", may_use_amx()), [0])
    ask = tvm.compile(tvm.IRModule({"ask": function.result}), target=AVX512)["ask"]
    answer = tvm.runtime.tensor(np.full(1, 7, "int32"))
    grants = ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
    for _ in range(2):
        ask(answer)
        assert bool(answer.numpy()[0]) == grants


EPILOGUES = {"bias": "relu(add(x0, x1))", "bias and residual": "add(gelu(add(x0, x1)), x2)"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("sizes", [(67, 96, 72), (40, 50, 33)], ids=str)
def test_epilogues_between_steps(sizes, text):
    m, k, n = sizes
    a, b, want = _operands(sizes, BF16)
    rng = fresh_rng()
    bias, residual = (rng.standard_normal(shape).astype("float32") for shape in ((n,), (m, n)))
    operands = [(operand((n,), "float32", "n"), bias), (operand((m, n), "float32", "mn"), residual)]
    used = operands if "x2" in text else operands[:1]
    problem = plain_problem(
        XEON, sizes, BF16, "m", epilogue=Epilogue(Expression.parse(text), tuple(op for op, _ in used))
    )
    symbolic = [operand(op.shape, op.dtype, op.index_map, symbols={"m": SYMBOLS["m"]}) for op, _ in used]
    problem = replace(problem, epilogue=replace(problem.epilogue, operands=tuple(symbolic)))
    want = want + bias
    want = (
        np.maximum(want, 0) if "relu" in text else want * (1 + np.vectorize(math.erf)(want / np.sqrt(2))) / 2 + residual
    )
    got = _run(problem, [a, b, *(array for _, array in used)], want.shape)
    assert_close(got, want, "float32", k, scale=4)


def test_batches_of_packed_activations_and_rows_after_them():
    rng = fresh_rng()
    a, b = random_array(rng, (3, 20, 70), "bfloat16"), random_array(rng, (3, 70, 40), "bfloat16")
    layout = PackedLayout((0, 2, 1), (2, 1), (32, 2))
    problem = MatmulProblem(
        operand((3, 20, 70), "bfloat16", ("b0", "m", "k")),
        operand((3, 70, 40), "bfloat16", ("b0", "k", "n"), layout),
        operand((3, 20, 40), "float32", ("b0", "m", "n")),
        "float32",
        rows=RowPhase(RowProgram.parse("r0 = max(x0); subtract(x0, r0)"), 0, ()),
    )
    want = a.astype("float64") @ b.astype("float64")
    want -= want.max(-1, keepdims=True)
    assert_close(_run(problem, [a, b], want.shape), want, "float32", 70)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("sizes", [(2, 40, 70, 200), (1, 33, 63, 17), (3, 17, 5, 32), (2, 300, 130, 90)], ids=str)
@pytest.mark.parametrize("types", [BF16, U8S8, ("int8", "uint8", "int32")], ids="-".join)
def test_activations_are_packed_in_the_kernel(types, sizes):
    batch, m, k, n = sizes
    rng = fresh_rng()
    a, b = random_array(rng, (batch, m, k), types[0]), random_array(rng, (batch, k, n), types[1])
    problem = MatmulProblem(
        operand(a.shape, types[0], ("b0", "m", "k")),
        operand(b.shape, types[1], ("b0", "k", "n")),
        operand((batch, m, n), types[2], ("b0", "m", "n")),
        types[2],
    )
    want = a.astype("float64") @ b.astype("float64")
    assert_close(_run(problem, [a, b], want.shape), want, types[2], k)
    permission = ctypes.c_int.in_dll(emulator(), "tiles_permission")
    permission.value = 0
    try:
        assert_close(_run(problem, [a, b], want.shape, by_tiles=False), want, types[2], k)
    finally:
        permission.value = 1


def test_left_operand_with_rows_among_other_dimensions():
    """Heads between rows and k, as attention's projections leave them."""
    rng = fresh_rng()
    a, b = random_array(rng, (35, 3, 96), "bfloat16"), random_array(rng, (3, 96, 64), "bfloat16")
    problem = MatmulProblem(
        operand((35, 3, 96), "bfloat16", ("m", "b0", "k")),
        operand((3, 96, 64), "bfloat16", ("b0", "k", "n"), PackedLayout((0, 2, 1), (2, 1), (32, 2))),
        operand((35, 3, 64), "float32", ("m", "b0", "n")),
        "float32",
    )
    want = np.einsum("mbk,bkn->mbn", a.astype("float64"), b.astype("float64"))
    assert_close(_run(problem, [a, b], want.shape), want, "float32", 96)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_main_loop_multiplies_all_tiles_that_it_loads(types):
    kernel = matmul_kernel(plain_problem(XEON, (256, 1280 if types == BF16 else 2560, 512), types), cpu_target_of(XEON))
    assembly = tvm.compile(tvm.IRModule({"matmul": kernel}), target=XEON).mod.inspect_source("asm")
    name = amx_instruction_for(cpu_target_of(XEON), *types).instruction.split(".")[-1]
    loops = [loop for loop in innermost_loops(assembly) if any(name in line for line in loop)]
    assert loops
    for loop in loops:
        products, loads = (sum(word in line for line in loop) for word in (name, "tileload"))
        assert products == loads >= 4
        assert not any("tilestored" in line or "(%rsp" in line and "tile" in line for line in loop)
    assert all(word in assembly for word in ("ldtilecfg", "tilerelease", "syscall"))
