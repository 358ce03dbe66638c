"""Products by tile registers (Intel AMX): emulated here, and as machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Epilogue, MatmulProblem
from relax_hetero.encoding.expression import Expression
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.tile_instructions import TILE_INSTRUCTIONS, tile_instruction_for
from relax_hetero.tir.matmul.matmul import matmul_kernel
from seeds import fresh_rng
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512, assert_close, numpy_type, operand, plain_problem, random_array, run_stored

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
TYPES = sorted(instruction.types for instruction in TILE_INSTRUCTIONS)
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
    x, y = Expression.operand(0), Expression.operand(1)
    residual = operand((67, 72), "float32", "mn")
    problem = plain_problem(XEON, sizes, BF16, epilogue=Epilogue(x + y, (residual,)))
    kernel = emulated(matmul_kernel(problem, cpu_target_of(XEON)))
    emulator()
    executable = tvm.compile(tvm.IRModule({"matmul": kernel}), target=AVX512)
    start = fresh_rng().standard_normal((67, 72)).astype("float32")
    memory = tvm.runtime.tensor(start)
    stored = [op.layout.pack(array) for op, array in zip(problem.parameters[:2], (a, b), strict=True)]
    executable["matmul"](*map(tvm.runtime.tensor, stored), memory, memory)
    assert_close(memory.numpy(), want + start, "float32", 96)
