"""Products of operands in every storage, with batches, initial accumulators and epilogues."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Epilogue, MatmulProblem
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.tiles import tile_columns
from seeds import fresh_rng
from tir.products_of import AVX2, AVX512, SSE, SYMBOLS, C, check, operand

F = "float32"
B, H, M, K, N = 3, 2, 13, 19, 21
TARGETS = {"avx512": AVX512, "avx2": AVX2, "sse": SSE, "c": C}

# One machine with numbers and two with symbols, with vectors that LLVM compiles quickly; `make test-slow` runs each
# with both.
DEFAULT = {("avx512", False), ("sse", True), ("c", True)}
pytestmark = pytest.mark.parametrize(
    ("target", "symbols"),
    [
        pytest.param(
            target,
            symbols,
            id=f"{name}-{'symbolic' if symbols else 'static'}",
            marks=() if (name, bool(symbols)) in DEFAULT else pytest.mark.slow,
        )
        for name, target in TARGETS.items()
        for symbols in (None, SYMBOLS)
    ],
)

Symbols = Mapping[str, str] | None


def _random(*shape: int) -> np.ndarray:
    return fresh_rng().standard_normal(shape).astype(F)


def _columns(target: tvm.target.Target) -> int:
    return tile_columns(cpu_target_of(target), F)


def _weight(target: tvm.target.Target) -> PackedLayout:
    return PackedLayout((1, 0), (1,), (_columns(target),))


@pytest.mark.parametrize("packed", [False, True], ids=["row-major", "packed"])
def test_batches(target: tvm.target.Target, symbols: Symbols, packed: bool) -> None:
    a, b = _random(B, M, K), _random(B, K, N)
    layout = PackedLayout((0, 2, 1), (2,), (_columns(target),)) if packed else None
    problem = MatmulProblem(
        operand(a.shape, F, ("b0", "m", "k"), symbols=symbols),
        operand(b.shape, F, ("b0", "k", "n"), layout, symbols),
        operand((B, M, N), F, ("b0", "m", "n"), symbols=symbols),
        F,
    )
    check(problem, target, [a, b], a.astype("float64") @ b, K)


@pytest.mark.parametrize("packed", [False, True], ids=["row-major", "packed"])
def test_absorbed_transposes(target: tvm.target.Target, symbols: Symbols, packed: bool) -> None:
    """Scores of attention: heads are a dimension in the middle of both operands, and of the result."""
    a, b = _random(B, M, H, K), _random(B, N, H, K)
    layout = PackedLayout((0, 2, 1, 3), (1,), (_columns(target),)) if packed else None
    problem = MatmulProblem(
        operand(a.shape, F, ("b0", "m", "b1", "k"), symbols=symbols),
        operand(b.shape, F, ("b0", "n", "b1", "k"), layout, symbols),
        operand((B, M, H, N), F, ("b0", "m", "b1", "n"), symbols=symbols),
        F,
    )
    check(problem, target, [a, b], np.einsum("bmhk,bnhk->bmhn", a.astype("float64"), b), K)


def test_left_operand_that_is_broadcast(target: tvm.target.Target, symbols: Symbols) -> None:
    a, b = _random(1, M, K), _random(B, K, N)
    problem = MatmulProblem(
        operand(a.shape, F, ("1", "m", "k"), symbols=symbols),
        operand(b.shape, F, ("b0", "k", "n"), symbols=symbols),
        operand((B, M, N), F, ("b0", "m", "n"), symbols=symbols),
        F,
    )
    check(problem, target, [a, b], a.astype("float64") @ b, K)


def test_left_operand_and_result_transposed(target: tvm.target.Target, symbols: Symbols) -> None:
    a, b, init = _random(K, M), _random(K, N), _random(N, M)
    problem = MatmulProblem(
        operand(a.shape, F, "km", symbols=symbols),
        operand(b.shape, F, "kn", _weight(target), symbols),
        operand((N, M), F, "nm", symbols=symbols),
        F,
        init=operand(init.shape, F, "nm", symbols=symbols),
    )
    check(problem, target, [a, b, init], (a.T.astype("float64") @ b).T + init, K)


@pytest.mark.parametrize("rows", [4, 8])
def test_everything_packed(target: tvm.target.Target, symbols: Symbols, rows: int) -> None:
    """A kernel with symbols whose operands are all packed never learns the exact sizes, and needs none."""
    a, b = _random(M, K), _random(K, N)
    columns = _columns(target)
    problem = MatmulProblem(
        operand(a.shape, F, "mk", PackedLayout((0, 1), (0, 1), (rows, 1)), symbols),
        operand(b.shape, F, "kn", PackedLayout((1, 0), (1, 0), (columns, 1)), symbols),
        operand((M, N), F, "mn", PackedLayout((0, 1), (0, 1), (rows, columns)), symbols),
        F,
    )
    check(problem, target, [a, b], a.astype("float64") @ b, K)


@pytest.mark.parametrize("columns", [4, 8, 16])
def test_packed_result_with_row_major_epilogue(target: tvm.target.Target, symbols: Symbols, columns: int) -> None:
    """Tiles of the result may be narrower than those of the right operand."""
    if columns % cpu_target_of(target).lanes(F):
        pytest.skip("tiles are whole vectors")
    a, b, init, residual = _random(M, K), _random(K, N), _random(N), _random(M, N)
    problem = MatmulProblem(
        operand(a.shape, F, "mk", PackedLayout((0, 1), (0,), (8,)), symbols),
        operand(b.shape, F, "kn", _weight(target), symbols),
        operand((M, N), F, "mn", PackedLayout((0, 1), (0, 1), (8, columns)), symbols),
        F,
        init=operand(init.shape, F, "n", symbols=symbols),
        epilogue=Epilogue(Expression.parse("add(x0, x1)"), (operand(residual.shape, F, "mn", symbols=symbols),)),
    )
    check(problem, target, [a, b, init, residual], a.astype("float64") @ b + init + residual, K, 2)


def test_epilogue_over_merged_batches(target: tvm.target.Target, symbols: Symbols) -> None:
    a, b, bias, residual = _random(B, M, K), _random(K, N), _random(N), _random(B, M, N)
    epilogue = Epilogue(
        Expression.parse("add(maximum(add(x0, x1), 0.0), x2)"),
        (
            operand(bias.shape, F, "n", symbols=symbols),
            operand(residual.shape, F, ("b0", "m", "n"), symbols=symbols),
        ),
    )
    problem = MatmulProblem(
        operand(a.shape, F, ("b0", "m", "k"), symbols=symbols),
        operand(b.shape, F, "kn", _weight(target), symbols),
        operand((B, M, N), F, ("b0", "m", "n"), symbols=symbols),
        F,
        epilogue=epilogue,
    )
    want = np.maximum(a.astype("float64") @ b + bias, 0) + residual
    check(problem, target, [a, b, bias, residual], want, K, 2)


def test_epilogue_operands_that_are_broadcast(target: tvm.target.Target, symbols: Symbols) -> None:
    """Some lack the batch, so that it cannot become part of m."""
    a, b = _random(B, M, K), _random(K, N)
    column, plane, scalar = _random(M, 1), _random(M, N), np.array(1.5, F)
    epilogue = Epilogue(
        Expression.parse("multiply(add(add(x0, x1), x2), x3)"),
        (
            operand(column.shape, F, ("m", "1"), symbols=symbols),
            operand(plane.shape, F, "mn", symbols=symbols),
            operand((), F, ()),
        ),
    )
    problem = MatmulProblem(
        operand(a.shape, F, ("b0", "m", "k"), symbols=symbols),
        operand(b.shape, F, "kn", _weight(target), symbols),
        operand((B, M, N), F, ("b0", "m", "n"), symbols=symbols),
        F,
        epilogue=epilogue,
    )
    want = (a.astype("float64") @ b + column + plane) * 1.5
    check(problem, target, [a, b, column, plane, scalar], want, K, 2)


def test_epilogue_waits_for_the_last_block_of_k(target: tvm.target.Target, symbols: Symbols) -> None:
    m, k = 40, 2500
    a, b, bias = _random(m, k), _random(k, N), _random(N)
    problem = MatmulProblem(
        operand(a.shape, F, "mk", symbols=symbols),
        operand(b.shape, F, "kn", _weight(target), symbols),
        operand((m, N), F, "mn", symbols=symbols),
        F,
        epilogue=Epilogue(Expression.parse("relu(add(x0, x1))"), (operand(bias.shape, F, "n", symbols=symbols),)),
    )
    check(problem, target, [a, b, bias], np.maximum(a.astype("float64") @ b + bias, 0), k)
