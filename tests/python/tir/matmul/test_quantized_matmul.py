"""Products with weights in blocks: formats, sizes, zero points, machines, symbols, epilogues."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from marks import in_turns
from relax_hetero.encoding.block_formats import FILE_FORMATS, integer_format
from relax_hetero.encoding.block_panels import BlockSource
from relax_hetero.encoding.block_weights import panel_columns
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue
from relax_hetero.tir.matmul import weight_unpacking
from relax_hetero.tir.matmul.quantized_matmul import quantized_matmul_kernel
from seeds import fresh_rng
from tir.kernel_runs import assembly, cpu_named, kernel, runs_here
from tir.matmul.block_problems import (
    FLOAT_NAMES,
    Weights,
    assert_close,
    call,
    integers,
    of_file,
    plain,
    problem_of,
)

pytestmark = pytest.mark.sampled(7)


def check(weights: Weights, rows: int, name: str, folder) -> None:
    panel = panel_columns(cpu_named(name))
    x = fresh_rng().standard_normal((rows, weights.source.depth), "float32")
    function = kernel(quantized_matmul_kernel(problem_of(weights, rows, panel), cpu_named(name)), name, folder)
    assert_close(call(function, x, weights.packed(panel), weights.columns), x, weights.numbers)


@pytest.mark.parametrize("zeros", ["", "uint8", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "block"),
    [(1, 64, 128, 32), (1, 37, 100, 16), (11, 70, 77, 128), (3, 5, 3, 8), (9, 33, 2056, 4112), (2, 40, 2300, 1536)],
)
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_sizes(name, rows, columns, depth, block, zeros, tmp_path):
    """Ragged ends of rows, columns, groups and blocks; blocks longer than what is added up at once."""
    check(integers(fresh_rng(), columns, depth, block, zeros), rows, name, tmp_path)


@pytest.mark.parametrize("zeros", ["", "uint8"])
@pytest.mark.parametrize(("bits", "block"), [(2, 16), (2, 64), (8, 16), (8, 40)])
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_integers_of_2_and_8_bits(name, bits, block, zeros, tmp_path):
    check(integers(fresh_rng(), 41, 100, block, zeros, bits), 5, name, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "case"),
    in_turns(FILE_FORMATS, itertools.product(FLOAT_NAMES, [(1, 37, 3), (4, 64, 1), (13, 5, 2)])),
    ids=str,
)
def test_formats_of_files(form, case, tmp_path):
    name, (rows, columns, superblocks) = case
    depth = (
        superblocks * FILE_FORMATS[form].superblock_size
        if FILE_FORMATS[form].superblock_size > 1
        else (67, 40, 1100)[superblocks - 1]
    )
    check(of_file(form, columns, depth), rows, name, tmp_path)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_one_symbolic_kernel_serves_all_rows(name, tmp_path):
    """A row has the same bits in tiles of any height."""
    rng = fresh_rng()
    panel = panel_columns(cpu_named(name))
    weights = integers(rng, 70, 160, 32, "uint8")
    function = kernel(quantized_matmul_kernel(problem_of(weights, "s0", panel), cpu_named(name)), name, tmp_path)
    x = rng.standard_normal((31, 160), "float32")
    full = call(function, x, weights.packed(panel), 70)
    assert_close(full, x, weights.numbers)
    for rows in (0, 1, 2, 3, 7, 8, 9):
        np.testing.assert_array_equal(call(function, x[:rows], weights.packed(panel), 70), full[:rows])


def test_batches_and_epilogues(tmp_path):
    """A bias, a tensor of the result's shape and one number; the result in another type."""
    name, rng = FLOAT_NAMES[0], fresh_rng()
    panel = panel_columns(cpu_named(name))
    weights = integers(rng, 45, 64, 32)
    plain_problem = problem_of(weights, 1, panel)
    expression = Expression.parse('cast(relu(multiply(add(add(x0, x1), x2), x3)), "float16")')
    names = ("b0", "m", "n")
    extra = (plain((45,), "float32", ("n",)), plain((2, 3, 45), "float32", names), plain((), "float32", ()))
    problem = replace(
        plain_problem,
        lhs=plain((2, 3, 64), "float32", ("b0", "m", "k")),
        result=plain((2, 3, 45), "float16", names),
        epilogue=Epilogue(expression, extra),
    )
    function = kernel(quantized_matmul_kernel(problem, cpu_named(name)), name, tmp_path)
    x, bias, more = (rng.standard_normal(shape, "float32") for shape in ((2, 3, 64), (45,), (2, 3, 45)))
    factor = np.array(0.5, "float32")
    got = call(function, x, [*weights.packed(panel), bias, more, factor], 45, "float16")
    want = np.maximum((x.astype("float64") @ weights.numbers.T + bias + more) * 0.5, 0)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_zero_points_and_weights_at_the_ends_are_exact(tmp_path):
    """Every weight with every zero point, times one: no rounding may show."""
    for name in FLOAT_NAMES:
        panel = panel_columns(cpu_named(name))
        codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
        data = codes[:, 0::2] | codes[:, 1::2] << 4
        zeros = np.arange(256, dtype=np.uint8)[:, None]
        arrays = (data, np.ones((256, 1), "float32"), zeros)
        weights = Weights(BlockSource(arrays, integer_format(4, 16, True), 16))
        function = kernel(quantized_matmul_kernel(problem_of(weights, 16, panel), cpu_named(name)), name, tmp_path)
        got = call(function, np.eye(16, dtype="float32"), weights.packed(panel), 256)
        np.testing.assert_array_equal(got, weights.numbers.T)


needs_zen5 = pytest.mark.skipif(not runs_here("vnni"), reason="this CPU lacks instructions of a Zen 5")


@pytest.mark.sampled(1)
@needs_zen5
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_each_line_of_weights_is_prefetched_once(rows, monkeypatch, tmp_path):
    """Except for the first ones of all: a tile of any number of rows reads a panel in order."""

    written = []

    def count(buffer, index):
        written.append(index)
        T.buffer_store(buffer, buffer[index] + tirx.const(1, "int8"), [index])

    monkeypatch.setattr(weight_unpacking, "prefetch", count)
    weights = of_file("f16", 128, 2048)
    packed = weights.packed(32)[0]
    after = packed[0].nbytes  # prefetches of the last panel are for one after it
    memory = np.zeros(packed.nbytes + after + 64, "uint8")
    memory = memory[-memory.ctypes.data % 64 :][: packed.nbytes + after]
    function = kernel(quantized_matmul_kernel(problem_of(weights, rows, 32), cpu_named("vnni")), "vnni", tmp_path)
    assert len(written) == 8  # a group of one chain
    result = tvm.runtime.tensor(np.empty((rows, 128), "float32"))
    view = memory[: packed.nbytes].view(packed.dtype).reshape(packed.shape)
    function(tvm.runtime.tensor(np.zeros((rows, 2048), "float32")), tvm.runtime.from_dlpack(view), result)
    counts = memory.reshape(-1, 64)[:, 0].astype(int)
    lines = packed.nbytes // 64
    assert counts.max() == 1
    assert counts.sum() == lines
    assert lines - counts[:lines].sum() == 8192 // 64


@pytest.mark.sampled(1)
def test_prefetched_rows_depend_on_the_cpu():
    """An ordinary CPU does not prefetch weights of 16 bits, nor a Zen 5 those of many rows."""
    weights = of_file("f16", 32, 512)
    for name, rows, prefetches in (("vnni", 8, True), ("vnni", 257, False), ("avx512", 8, False)):
        text = assembly(quantized_matmul_kernel(problem_of(weights, rows, 32), cpu_named(name)), name)
        assert ("prefetch" in text) == prefetches, (name, rows)


@pytest.mark.sampled(1)
@needs_zen5
@pytest.mark.parametrize(("form", "rows"), [("f16", 1), ("bf16", 2), ("f16", 11)])
def test_prefetches_with_ragged_ends(form, rows, tmp_path):
    """A rest of a chain and of columns."""
    check(of_file(form, 37, 5 * 256 + 67), rows, "vnni", tmp_path)
