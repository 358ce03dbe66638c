"""Products with weights in blocks by dot products of bytes: formats, sizes, machines, numbers at the ends."""

from __future__ import annotations

import numpy as np
import pytest

from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import PanelPlan
from relax_hetero.encoding.block_weights import panel_columns
from relax_hetero.tir.matmul.block_dots import MAX_INTEGER_CHAIN, MIN_UNPACKED_ROWS
from relax_hetero.tir.matmul.quantized_matmul import quantized_matmul_kernel
from relax_hetero.tir.matmul.weight_bytes import byte_order
from seeds import fresh_rng
from tir.kernel_runs import assembly, cpu_named, kernel, runs_here
from tir.matmul.block_problems import Weights, as_bytes, assert_close, call, integers, of_file, problem_of

NAMES = [name for name in ("vnni", "early_vnni", "avxvnni", "avx2", "sse4", "dotprod") if runs_here(name)]
PLAIN = ("f16", "bf16")
MANY = max(MIN_UNPACKED_ROWS.values())

ROUNDING = 3e-5
"""Relative error of 16-bit numbers: one in 65,024 of a chain's largest element."""


def product(weights: Weights, x: np.ndarray, name: str, folder, bits: int = 16) -> np.ndarray:
    cpu = cpu_named(name)
    panel = panel_columns(cpu)
    function = kernel(quantized_matmul_kernel(problem_of(weights, len(x), panel, bits), cpu), name, folder)
    return call(function, x, weights.packed(panel), weights.columns)


def check(weights: Weights, rows: int, name: str, folder, bits: int = 16) -> None:
    x = fresh_rng().standard_normal((rows, weights.source.depth), "float32")
    got = product(weights, x, name, folder, bits)
    if bits == 16:
        assert_close(got, x, weights.numbers, ROUNDING)
    else:  # the same bytes in numpy leave but the rounding of float32
        block = PanelPlan(weights.form, weights.source.depth, panel_columns(cpu_named(name))).block
        chain = block if block <= MAX_INTEGER_CHAIN[1] else np.gcd(block, MAX_INTEGER_CHAIN[1])
        assert_close(got, as_bytes(x, int(chain), name), weights.numbers, 2e-6)


@pytest.mark.parametrize(("rows", "columns", "superblocks"), [(1, 37, 3), (4, 64, 1), (13, 5, 2)])
@pytest.mark.parametrize("form", [form for form in FILE_FORMATS if form not in PLAIN])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(30)
def test_formats_of_files(name, form, rows, columns, superblocks, tmp_path):
    check(of_file(form, columns, superblocks * FILE_FORMATS[form].superblock_size), rows, name, tmp_path)


@pytest.mark.parametrize(("rows", "columns", "superblocks"), [(1, 37, 3), (MANY + 3, 70, 2), (13, 5, 2)])
@pytest.mark.parametrize("form", [form for form in FILE_FORMATS if form not in PLAIN])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(30)
def test_activations_of_bytes(name, form, rows, columns, superblocks, tmp_path):
    check(of_file(form, columns, superblocks * FILE_FORMATS[form].superblock_size), rows, name, tmp_path, bits=8)


@pytest.mark.parametrize("zeros", ["", "uint8", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "block", "bits"),
    [
        (1, 37, 100, 16, 4),
        (11, 70, 77, 128, 4),
        (2, 40, 2300, 1536, 4),
        (5, 41, 100, 64, 2),
        (9, 33, 300, 32, 8),
        (MANY + 5, 45, 200, 128, 4),
    ],
)
@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(30)
def test_integers(name, activation_bits, rows, columns, depth, block, bits, zeros, tmp_path):
    """Ragged ends of rows, columns and blocks; blocks longer than what is added up at once; panels unpacked first."""
    check(integers(fresh_rng(), columns, depth, block, zeros, bits), rows, name, tmp_path, activation_bits)


@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(1)
def test_rows_that_end_within_a_vector(name, activation_bits, tmp_path):
    """The lanes after the last number are zeros, also where a CPU loads single numbers for want of masks."""
    check(integers(fresh_rng(), 70, 77, 128), 11, name, tmp_path, activation_bits)


@pytest.mark.parametrize("name", NAMES)
def test_one_symbolic_kernel_serves_all_rows(name, tmp_path):
    cpu, rng = cpu_named(name), fresh_rng()
    weights = integers(rng, 70, 96, 32, "uint8")
    packed = weights.packed(panel_columns(cpu))
    function = kernel(quantized_matmul_kernel(problem_of(weights, "s0", panel_columns(cpu)), cpu), name, tmp_path)
    for rows in (0, 1, 3, MIN_UNPACKED_ROWS[2] - 1, MIN_UNPACKED_ROWS[2], 9, 31):
        x = rng.standard_normal((rows, 96), "float32")
        assert_close(call(function, x, packed, 70), x, weights.numbers, ROUNDING)


@pytest.mark.parametrize("form", ["q4_0", "q6_k"])
def test_numbers_of_all_sizes(form, tmp_path):
    """Each chain has its own scale, so that large numbers of other chains do not swamp its small ones."""
    if not NAMES:
        pytest.skip("this CPU lacks dot products of bytes in vectors of 64")
    weights = of_file(form, 8, 512)
    chain = FILE_FORMATS[form].block
    sizes = 10.0 ** np.arange(-20, 12)[:, None] * np.ones((1, 512 // chain))
    sizes[:, ::2] *= 1e-6
    x = fresh_rng().standard_normal((32, 512)) * np.repeat(sizes, chain, axis=1)
    got = product(weights, x.astype("float32"), NAMES[0], tmp_path)
    assert_close(got, x.astype("float32"), weights.numbers, ROUNDING)


def test_zeros_infinities_and_nan(tmp_path):
    """Rows of zeros are zeros, tiny numbers too; a number that is not finite shows in its row, and in no other."""
    if not NAMES:
        pytest.skip("this CPU lacks dot products of bytes in vectors of 64")
    weights = of_file("q4_0", 8, 64)
    x = np.ones((9, 64), "float32")
    x[1], x[2], x[4, 5], x[6, 7] = 0, 1e-40, np.nan, np.inf
    got = product(weights, x, NAMES[0], tmp_path)
    assert not got[1].any() and np.abs(got[2]).max() < 1e-30
    assert np.isnan(got[4]).all() and not np.isfinite(got[6]).any()
    fine = [0, 3, 5, 7, 8]
    assert_close(got[fine], x[fine], weights.numbers, ROUNDING)


@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_every_weight_of_a_group_has_its_byte(bits):
    order = byte_order(bits)
    assert sorted(order) == list(range(len(order)))


@pytest.mark.parametrize("name", NAMES)
def test_machine_code(name):
    """A chain of 32 weights: for each row eight steps, for each byte of a number and each vector of columns."""
    cpu = cpu_named(name)
    weights = of_file("q5_0", 64, 512)
    step = "vpdpbusd" if "vnni" in name else "\tsdot" if name == "dotprod" else "pmaddubsw"
    text = assembly(quantized_matmul_kernel(problem_of(weights, 1, panel_columns(cpu)), cpu), name)
    assert text.count(step) == 8 * 2 * 2
    bytes_alone = assembly(quantized_matmul_kernel(problem_of(weights, 1, panel_columns(cpu), 8), cpu), name)
    assert bytes_alone.count(step) == 8 * 2
    assert ("vpmultishiftqb" in text) == (name == "vnni")
