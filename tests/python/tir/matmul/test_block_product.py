"""Products with weights of 4 bits: sizes, blocks, zero points, machines, symbols, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.block_weights import GROUP, pack_blocks, pack_weights, panel_columns
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import BlockProductProblem, Epilogue, Operand
from relax_hetero.tir.matmul.block_product import block_product_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, cpu_named, kernel

pytestmark = pytest.mark.sampled(7)

PANEL = ("panel", "row", "column")


@dataclass(frozen=True)
class Weights:
    """Random weights of a product, as models have them."""

    data: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    depth: int
    block: int

    @property
    def numbers(self) -> np.ndarray:
        """(n, k) in float64."""
        rows = self.data.shape[0]
        codes = np.stack([self.data & 15, self.data >> 4], -1).reshape(rows, -1)[:, : self.depth].astype("float64")
        points, scales = (
            np.repeat(values.astype("float64"), self.block, axis=1)[:, : self.depth]
            for values in (np.full(self.scales.shape, 8) if self.zeros is None else self.zeros, self.scales)
        )
        return (codes - points) * scales

    def packed(self, panel: int) -> list[np.ndarray]:
        blocks = [self.scales] if self.zeros is None else [self.scales, self.zeros]
        return [pack_weights(self.data, self.depth, panel), *(pack_blocks(values, panel) for values in blocks)]


def random_weights(rng: np.random.Generator, columns: int, depth: int, block: int, zeros: str = "") -> Weights:
    blocks = -(-depth // block)
    data = rng.integers(0, 256, (columns, -(-depth // 2)), dtype=np.uint8)
    points = None
    if zeros == "uint8":
        points = rng.integers(0, 256, (columns, blocks), dtype=np.uint8)
    elif zeros == "float32":
        points = rng.uniform(0, 15, (columns, blocks)).astype("float32")
    return Weights(data, rng.standard_normal((columns, blocks), "float32"), points, depth, block)


def plain(shape: tuple[int | str, ...], dtype: str, index_map: tuple[str, ...]) -> Operand:
    return Operand(shape, dtype, index_map, PackedLayout.identity(len(shape)))


def problem_of(weights: Weights, rows: int | str, panel: int) -> BlockProductProblem:
    packed = tuple(plain(array.shape, str(array.dtype), PANEL) for array in weights.packed(panel))
    columns = weights.data.shape[0]
    lhs, result = plain((rows, weights.depth), "float32", ("m", "k")), plain((rows, columns), "float32", ("m", "n"))
    return BlockProductProblem(lhs, packed, result, weights.block)


def call(function: Callable[..., None], x: np.ndarray, packed: list[np.ndarray], columns: int, dtype: str = "float32"):
    """The result, whose memory was poisoned."""
    result = tvm.runtime.tensor(np.full((*x.shape[:-1], columns), np.nan, dtype))
    function(*map(tvm.runtime.tensor, [x, *packed]), result)
    return result.numpy()


def assert_close(got: np.ndarray, x: np.ndarray, numbers: np.ndarray) -> None:
    want = x.astype("float64") @ numbers.T
    size = np.abs(x).astype("float64") @ np.abs(numbers).T
    np.testing.assert_array_less(np.abs(got - want), 1e-6 * size + 1e-30)


@pytest.mark.parametrize("zeros", ["", "uint8", "float32"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "block"),
    [(1, 64, 128, 32), (1, 37, 100, 16), (11, 70, 77, 128), (3, 5, 3, 8), (9, 33, 2056, 4112), (2, 40, 2300, 1536)],
)
@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, rows, columns, depth, block, zeros, tmp_path):
    """Ragged ends of rows, columns, groups and blocks; blocks longer than what is added up at once."""
    rng = fresh_rng()
    panel = panel_columns(cpu_named(name))
    weights = random_weights(rng, columns, depth, block, zeros)
    x = rng.standard_normal((rows, depth), "float32")
    function = kernel(block_product_kernel(problem_of(weights, rows, panel), cpu_named(name)), name, tmp_path)
    assert_close(call(function, x, weights.packed(panel), columns), x, weights.numbers)


@pytest.mark.parametrize("name", NAMES)
def test_one_symbolic_kernel_serves_all_rows(name, tmp_path):
    rng = fresh_rng()
    panel = panel_columns(cpu_named(name))
    weights = random_weights(rng, 70, 96, 32, "uint8")
    function = kernel(block_product_kernel(problem_of(weights, "s0", panel), cpu_named(name)), name, tmp_path)
    for rows in (0, 1, 2, 3, 7, 8, 9, 31):
        x = rng.standard_normal((rows, 96), "float32")
        assert_close(call(function, x, weights.packed(panel), 70), x, weights.numbers)


def test_batches_and_what_is_done_to_sums(tmp_path):
    """A bias, a tensor of the result's shape and one number; the result in another type."""
    name, rng = NAMES[0], fresh_rng()
    panel = panel_columns(cpu_named(name))
    weights = random_weights(rng, 45, 64, 32)
    plain_problem = problem_of(weights, 1, panel)
    expression = Expression.parse('cast(relu(multiply(add(add(x0, x1), x2), x3)), "float16")')
    names = ("b0", "m", "n")
    others = (plain((45,), "float32", ("n",)), plain((2, 3, 45), "float32", names), plain((), "float32", ()))
    problem = replace(
        plain_problem,
        lhs=plain((2, 3, 64), "float32", ("b0", "m", "k")),
        result=plain((2, 3, 45), "float16", names),
        epilogue=Epilogue(expression, others),
    )
    function = kernel(block_product_kernel(problem, cpu_named(name)), name, tmp_path)
    x, bias, more = (rng.standard_normal(shape, "float32") for shape in ((2, 3, 64), (45,), (2, 3, 45)))
    factor = np.array(0.5, "float32")
    got = call(function, x, [*weights.packed(panel), bias, more, factor], 45, "float16")
    want = np.maximum((x.astype("float64") @ weights.numbers.T + bias + more) * 0.5, 0)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_zero_points_and_weights_at_the_ends_are_exact(tmp_path):
    """Every weight with every zero point, times one: no rounding may show."""
    for name in NAMES:
        panel = panel_columns(cpu_named(name))
        codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
        data = codes[:, 0::2] | codes[:, 1::2] << 4
        zeros = np.arange(256, dtype=np.uint8)[:, None]
        weights = Weights(data, np.ones((256, 1), "float32"), zeros, 16, 16)
        function = kernel(block_product_kernel(problem_of(weights, 16, panel), cpu_named(name)), name, tmp_path)
        got = call(function, np.eye(16, dtype="float32"), weights.packed(panel), 256)
        np.testing.assert_array_equal(got, weights.numbers.T)


def test_packing_says_where_every_weight_is():
    rng = fresh_rng()
    data = rng.integers(0, 256, (37, 50), dtype=np.uint8)
    packed = pack_weights(data, 99, 16)
    assert packed.shape == (3, 13, 16)
    codes = np.stack([data & 15, data >> 4], -1).reshape(37, 100)
    for column, k in ((0, 0), (36, 98), (17, 9), (15, 64)):
        lane = int(packed[column // 16, k // GROUP, column % 16])
        assert lane >> 4 * (k % GROUP) & 15 == codes[column, k]
    assert not packed[2, :, 5:].any()
    assert pack_blocks(np.arange(6, dtype="float32").reshape(3, 2), 2)[1].tolist() == [[4, 0], [5, 0]]
