"""Products of rows by the experts that they choose: formats, sizes, machines, symbols, epilogues."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tvm

from marks import in_turns
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import Panels
from relax_hetero.encoding.block_weights import panel_columns
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, QuantizedMatmulProblem
from relax_hetero.target.cpu_target import ZEN4
from relax_hetero.tir.matmul.block_dots import MIN_UNPACKED_ROWS
from relax_hetero.tir.matmul.quantized_matmul import quantized_matmul_kernel
from seeds import fresh_rng
from tir.kernel_runs import cpu_named, kernel, runs_here
from tir.matmul.block_problems import FLOAT_NAMES, Weights, as_bytes, integers, of_file, plain

pytestmark = pytest.mark.sampled(7)

MAPS = ("b0", "b1", "m")


def problem_of(
    weights: Weights, experts: int, tokens: int | str, used: int, panel: int, shared: bool = True
) -> QuantizedMatmulProblem:
    """`weights` are rows of all experts."""
    depth, columns, form = weights.source.depth, weights.columns // experts, weights.form
    (packed,) = Panels(panel).pack(weights.source, experts)
    lhs = plain((tokens, 1 if shared else used, 1, depth), "float32", (*MAPS, "k"))
    result = plain((tokens, used, 1, columns), "float32", (*MAPS, "n"))
    index = plain((tokens, used), "int32", MAPS[:2])
    weight = plain(packed.shape, "uint8", Panels.index_map)
    return QuantizedMatmulProblem(lhs, (weight,), result, form.block, None, form.bits, form, experts, index)


def call(function, x, weights, experts, panel, index, *extra):
    """The result, whose memory was poisoned."""
    (packed,) = Panels(panel).pack(weights.source, experts)
    result = tvm.runtime.tensor(np.full((*index.shape, 1, weights.columns // experts), np.nan, "float32"))
    function(*map(tvm.runtime.tensor, [x, packed, index, *extra]), result)
    return result.numpy()


def expected(x, weights, experts, index):
    """Sums in float64, and sums of absolute terms."""
    numbers = weights.numbers.reshape(experts, -1, weights.source.depth)[np.clip(index, 0, experts - 1)]
    rows = np.broadcast_to(x[:, :, 0].astype("float64"), (*index.shape, x.shape[-1]))
    return tuple(np.einsum("tuk,tunk->tun", a, b)[:, :, None] for a, b in ((rows, numbers), (abs(rows), abs(numbers))))


def check(weights, experts, tokens, used, shared, name, folder):
    rng, panel, cpu = fresh_rng(), panel_columns(cpu_named(name)), cpu_named(name)
    problem = problem_of(weights, experts, tokens, used, panel, shared)
    function = kernel(quantized_matmul_kernel(problem, cpu), name, folder)
    x = rng.standard_normal((tokens, 1 if shared else used, 1, weights.source.depth), "float32")
    # Some experts get zero rows, and one may get nearly all; some pairs are of another device.
    index = rng.choice(rng.permutation(experts + 1)[:experts] - 1, (tokens, used)).astype("int32")
    want, size = expected(x, weights, experts, index)
    actual = call(function, x, weights, experts, panel, index)
    assert np.isnan(actual[index < 0]).all()
    np.testing.assert_array_less(np.abs(actual - want)[index >= 0], (1e-6 * size + 1e-30)[index >= 0])


DOT_NAMES = [name for name in ("vnni", "early_vnni", "avxvnni", "avx2", "sse4", "dotprod") if runs_here(name)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cores", [2, 14])
@pytest.mark.parametrize("tokens", [1, 7, 2 * max(MIN_UNPACKED_ROWS.values())])
@pytest.mark.parametrize(("form", "bits"), [("q4_k", 8), ("q4_0", 16), ("q6_k", 8)])
@pytest.mark.parametrize("name", DOT_NAMES)
def test_dot_products_of_bytes(name, form, bits, tokens, cores, tmp_path):
    """Experts with few rows and with many, whose panels are unpacked; more tasks than experts of a token."""
    rng, used, experts, columns, depth = fresh_rng(), 3, 5, 70, 256
    cpu, panel = replace(cpu_named(name), cores=cores), panel_columns(cpu_named(name))
    if cores == 14:  # unpacks for more rows only
        cpu = replace(cpu, features=cpu.features | {ZEN4})
    weights = of_file(form, experts * columns, depth)
    problem = replace(problem_of(weights, experts, tokens, used, panel), activation_bits=bits)
    function = kernel(quantized_matmul_kernel(problem, cpu), name, tmp_path)
    x = rng.standard_normal((tokens, 1, 1, depth), "float32")
    index = np.where(rng.random((tokens, used)) < 0.8, 2, rng.integers(-1, experts - 1, (tokens, used))).astype("int32")
    read = x if bits == 16 else as_bytes(x[:, 0, 0], min(32, weights.form.block), name)[:, None, None]
    want, size = expected(read, weights, experts, index)
    actual = call(function, x, weights, experts, panel, index)
    tolerance = (3e-5 if bits == 16 else 2e-6) * size
    assert np.isnan(actual[index < 0]).all()
    np.testing.assert_array_less(np.abs(actual - want)[index >= 0], tolerance[index >= 0])


SIZES = [(1, 3, 5, 37, True), (4, 2, 3, 64, False), (23, 2, 4, 5, True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("form", "case"), in_turns(FILE_FORMATS, itertools.product(FLOAT_NAMES, SIZES)), ids=str)
def test_formats_of_files(form, case, tmp_path):
    """Tokens, experts for each, experts in all, columns, and whether the experts of a token share a row."""
    name, (tokens, used, experts, columns, shared) = case
    depth = FILE_FORMATS[form].superblock_size if FILE_FORMATS[form].superblock_size > 1 else 67
    check(of_file(form, experts * columns, depth), experts, tokens, used, shared, name, tmp_path)


@pytest.mark.parametrize("zeros", ["", "uint8"])
@pytest.mark.parametrize(("bits", "block", "depth"), [(2, 16, 100), (4, 32, 77), (8, 40, 100)])
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_integers(name, bits, block, depth, zeros, tmp_path):
    check(integers(fresh_rng(), 3 * 41, depth, block, zeros, bits), 3, 9, 2, False, name, tmp_path)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_one_symbolic_kernel_serves_all_tokens(name, tmp_path):
    """Fewer and more than are sorted at once; numbers above the last expert are the last, negative ones are none."""
    rng, panel = fresh_rng(), panel_columns(cpu_named(name))
    weights = of_file("q4_1", 3 * 40, 32)
    function = kernel(quantized_matmul_kernel(problem_of(weights, 3, "s0", 2, panel), cpu_named(name)), name, tmp_path)
    for tokens in (0, 1, 9, 1100):
        x = rng.standard_normal((tokens, 1, 1, 32), "float32")
        index = rng.integers(-2, 6, (tokens, 2)).astype("int32")
        want, size = expected(x, weights, 3, index)
        actual = call(function, x, weights, 3, panel, index)
        assert np.isnan(actual[index < 0]).all()
        np.testing.assert_array_less(np.abs(actual - want)[index >= 0], (1e-6 * size + 1e-30)[index >= 0])


def test_epilogues(tmp_path):
    """A tensor of the result's shape, one number for each column, one for all."""
    name, rng = FLOAT_NAMES[0], fresh_rng()
    panel, weights = panel_columns(cpu_named(name)), of_file("q4_0", 4 * 45, 64)
    expression = Expression.parse("multiply(multiply(silu(x0), x1), add(x2, x3))")
    extra = (
        plain((6, 2, 1, 45), "float32", (*MAPS, "n")),
        plain((45,), "float32", ("n",)),
        plain((), "float32", ()),
    )
    problem = replace(problem_of(weights, 4, 6, 2, panel), epilogue=Epilogue(expression, extra))
    function = kernel(quantized_matmul_kernel(problem, cpu_named(name)), name, tmp_path)
    x, more, column = (rng.standard_normal(shape, "float32") for shape in ((6, 1, 1, 64), (6, 2, 1, 45), (45,)))
    index = rng.integers(0, 4, (6, 2)).astype("int32")
    actual = call(function, x, weights, 4, panel, index, more, column, np.array(0.5, "float32"))
    sums, _ = expected(x, weights, 4, index)
    np.testing.assert_allclose(actual, sums / (1 + np.exp(-sums)) * more * (column + 0.5), rtol=1e-4, atol=1e-4)
