"""Products and convolutions by matrix instructions of AArch64 (I8MM, BF16), emulated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Epilogue, MatmulProblem, Window
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import dot_instruction_for
from relax_hetero.target.tiles import TILE_SIZES
from relax_hetero.tir.conv.convolution import conv_kernel
from relax_hetero.tir.matmul.matmul import matmul_kernel
from seeds import fresh_rng
from tir.convolutions_of import assert_near, conv_problem, random_operands, reference
from tir.kernel_runs import poisoned, runs_here
from tir.matmul.matrix_emulator import emulated, emulator, products_so_far
from tir.products_of import SSE, assert_close, operand, plain_problem, random_array, run_stored

pytestmark = pytest.mark.skipif(not runs_here("sse"), reason="emulated instructions stand beside vectors of 16 bytes")

GRAVITON = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1", "num-cores": 2})
CPU = cpu_target_of(GRAVITON)
BF16, U8S8, S8U8 = ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"), ("int8", "uint8", "int32")
TYPES = {
    "bf16": BF16,
    "u8s8": U8S8,
    "s8u8": S8U8,
    "s8s8": ("int8", "int8", "int32"),
    "u8u8": ("uint8", "uint8", "int32"),
}


@pytest.fixture(autouse=True)
def operands_in_place(monkeypatch):
    """Micro-kernels of packed panels are assembly, which qemu emulates in `tests/python/arm`."""
    monkeypatch.setitem(TILE_SIZES, "neon", replace(TILE_SIZES["neon"], panel_rows=0))


def test_all_low_types_have_one():
    assert [dot_instruction_for(CPU, *types).rows for types in TYPES.values()] == [2] * 5
    assert dot_instruction_for(CPU, *BF16, by_rows=True).name == "bfdot"


def _multiply(problem: MatmulProblem, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    emulator()
    executable = tvm.compile(tvm.IRModule({"matmul": emulated(matmul_kernel(problem, CPU))}), target=SSE)
    stored = [op.layout.pack(array) for op, array in zip(problem.parameters[:-1], arrays, strict=True)]
    before = products_so_far()
    got = run_stored(executable, problem, SSE, stored, shape)
    assert products_so_far() > before
    return got


def _check_product(types: tuple[str, str, str], sizes: tuple[int, int, int], symbolic: str = "") -> None:
    rng, (m, k, n) = fresh_rng(), sizes
    a, b = random_array(rng, (m, k), types[0]), random_array(rng, (k, n), types[1])
    want = a.astype("float64") @ b.astype("float64")
    assert_close(_multiply(plain_problem(GRAVITON, sizes, types, symbolic), [a, b], want.shape), want, types[2], k)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", [(16, 64, 16), (1, 40, 8), (7, 37, 13), (3, 5, 2), (40, 7000, 9)], ids=str)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_products(types, sizes):
    _check_product(types, sizes)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_symbolic_rows_and_depth(types, m):
    _check_product(types, (m, 43, 20), "mk" if types == BF16 else "m")


def test_a_start_and_an_epilogue_meet_their_rows():
    rng, (m, k, n) = fresh_rng(), (11, 4500, 10)
    a, b, start, residual = (random_array(rng, shape, "float32") for shape in ((m, k), (k, n), (m, n), (m, n)))
    low = [np.asarray(array, dtype=random_array(rng, (1,), "bfloat16").dtype) for array in (a, b)]
    plain = plain_problem(GRAVITON, (m, k, n), BF16)
    problem = MatmulProblem(
        plain.lhs, plain.rhs, plain.result, "float32", operand((m, n), "float32", "mn"),
        Epilogue(Expression.parse("add(x0, x1)"), (operand((m, n), "float32", "mn"),)),
    )  # fmt: skip
    want = low[0].astype("float64") @ low[1].astype("float64") + start + residual
    assert_close(_multiply(problem, [*low, start, residual], want.shape), want, "float32", k)


def _convolve(problem: ConvProblem, arrays: Sequence[np.ndarray]) -> np.ndarray:
    emulator()
    kernel = emulated(conv_kernel(problem, CPU)).with_attr("global_symbol", "kernel")
    executable = tvm.compile(tvm.IRModule({"kernel": kernel}), target=SSE)
    tensors = [tvm.runtime.tensor(op.layout.pack(a)) for op, a in zip(problem.parameters[:-1], arrays, strict=True)]
    shape = (len(arrays[0]), *(int(extent) for extent in problem.result.shape[1:]))
    out = poisoned(problem.result.layout.packed_shape(shape), problem.result.dtype)
    before = products_so_far()
    executable["kernel"](*tensors, out)
    assert products_so_far() > before
    return problem.result.layout.unpack(out.numpy(), shape)


SAME = Window(3, before=1, after=1)
CONVOLUTIONS = {
    "same": ((16, 20), (5, 13), (SAME, SAME), 1),
    "channels that do not fill a step": ((11, 8), (4, 9), (SAME, Window(3, 2, 1, 0, 1)), 1),
    "first layer": ((3, 12), (7, 11), (Window(3, 2, 1, 1, 1), Window(3, 2, 1, 1, 1)), 1),
    "groups": ((32, 24), (3, 7), (Window(3), SAME), 2),
    "more padding than data": ((8, 9), (3, 5), (Window(2), Window(4, 1, 1, 3, 5)), 1),
    "volume": ((8, 9), (2, 3, 6), (Window(1), SAME, SAME), 1),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_convolutions(types, case):
    channels, image, windows, groups = CONVOLUTIONS[case]
    problem = conv_problem(CPU, channels, image, windows, groups, dtype=types)
    arrays = random_operands(problem, fresh_rng(), 1)
    assert_near(problem, _convolve(problem, arrays), reference(problem, arrays[0], arrays[1]))
