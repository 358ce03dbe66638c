"""Convolutions as problems, run by their kernels and compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import tvm

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Dim, Epilogue, Operand, Window
from relax_hetero.encoding.tiles import conv_columns
from relax_hetero.tir.convolution import conv_kernel
from tir.kernel_runs import kernel, machine_named, stored


def channels_last(rank: int) -> PackedLayout:
    """NHWC, of an operand whose logical dimensions are those of NCHW."""
    return PackedLayout((0, *range(2, rank), 1))


def weight_layout(name: str, dtype: str, shape: Sequence[int], groups: int) -> PackedLayout:
    """How a weight is packed for a target."""
    columns = conv_columns(machine_named(name), dtype, shape[0] // groups, shape[1], groups)
    if columns == 0:
        return PackedLayout((1, *range(2, len(shape)), 0))
    return PackedLayout(channels_last(len(shape)).outer_perm, (0,), (columns,))


def conv_problem(
    name: str,
    channels: tuple[int, int],
    extents: Sequence[int],
    windows: Sequence[Window],
    groups: int = 1,
    batch: Dim = 1,
    dtype: str = "float32",
    data_layout: PackedLayout | None = None,
) -> ConvProblem:
    """`channels` are those of the data and of the result; data and result are stored channels-last."""
    ins, outs = channels
    rank = len(extents) + 2
    axes = range(len(extents))
    places = tuple(window.places(extent) for window, extent in zip(windows, extents, strict=True))
    weight = (outs, ins // groups, *(window.size for window in windows))
    return ConvProblem(
        Operand(
            (batch, ins, *extents), dtype, ("b", "c", *(f"x{d}" for d in axes)), data_layout or channels_last(rank)
        ),
        Operand(weight, dtype, ("n", "k", *(f"w{d}" for d in axes)), weight_layout(name, dtype, weight, groups)),
        Operand((batch, outs, *places), dtype, ("b", "n", *(f"y{d}" for d in axes)), channels_last(rank)),
        dtype,
        tuple(windows),
        groups,
    )


def with_epilogue(problem: ConvProblem, expression: str, *shown: str) -> ConvProblem:
    """`shown` says for each operand which dimensions of the result it has: "n" a bias, "bny" all of them."""
    names, rank = problem.result.index_map, len(problem.result.index_map)
    operands = []
    for dims in shown:
        index_map = tuple(name if name[0] in dims else "1" for name in names)
        shape = tuple(size if name[0] in dims else 1 for size, name in zip(problem.result.shape, names, strict=True))
        layout = channels_last(rank) if "y" in dims else PackedLayout.identity(rank)
        operands.append(Operand(shape, problem.result.dtype, index_map, layout))
    return replace(problem, epilogue=Epilogue(Expression.parse(expression), tuple(operands)))


def reference(problem: ConvProblem, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The sums of products, without the epilogue, in float64."""
    windows, groups = problem.windows, problem.groups
    padded = np.pad(data.astype("float64"), [(0, 0), (0, 0), *((w.before, w.after) for w in windows)])
    places = [w.places(extent) for w, extent in zip(windows, data.shape[2:], strict=True)]
    total = np.zeros((len(data), groups, weight.shape[0] // groups, int(np.prod(places))))
    for taps in np.ndindex(*weight.shape[2:]):
        cut = tuple(
            slice(tap * w.dilation, tap * w.dilation + (count - 1) * w.stride + 1, w.stride)
            for tap, w, count in zip(taps, windows, places, strict=True)
        )
        seen = padded[(slice(None), slice(None), *cut)].reshape(
            total.shape[0], groups, weight.shape[1], total.shape[-1]
        )
        factors = weight[(slice(None), slice(None), *taps)].astype("float64").reshape(groups, -1, weight.shape[1])
        total += np.einsum("bgkp,gnk->bgnp", seen, factors)
    return total.reshape(len(data), weight.shape[0], *places)


def random_operands(problem: ConvProblem, rng: np.random.Generator, batch: int = 1) -> list[np.ndarray]:
    """All but the result; a symbolic batch is `batch`."""
    shapes = [[batch if isinstance(dim, str) else dim for dim in operand.shape] for operand in problem.parameters[:-1]]
    return [rng.standard_normal(shape).astype(problem.data.dtype) for shape in shapes]


@cache
def _kernel(problem: ConvProblem, name: str, folder: Path) -> Callable[..., None]:
    return kernel(conv_kernel(problem, machine_named(name)), name, folder)


def run(problem: ConvProblem, name: str, folder: Path, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The result; its storage is NaN before, and so is the padding of operands."""
    operands = problem.parameters[:-1]
    tensors = [
        tvm.runtime.tensor(stored(array, operand.layout)) for operand, array in zip(operands, arrays, strict=True)
    ]
    shape = (len(arrays[0]), *(int(extent) for extent in problem.result.shape[1:]))
    out = tvm.runtime.tensor(np.full(problem.result.layout.packed_shape(shape), np.nan, problem.result.dtype))
    _kernel(problem, name, folder)(*tensors, out)
    return problem.result.layout.unpack(out.numpy(), shape)


def assert_near(problem: ConvProblem, got: np.ndarray, want: np.ndarray) -> None:
    """Within 2e-5 times the root of the products of a sum, 1e-13 for float64."""
    unit = 2e-5 if problem.acc_dtype == "float32" else 1e-13
    products = np.prod([int(extent) for extent in problem.weight.shape[1:]])
    np.testing.assert_allclose(got.astype("float64"), want, rtol=0, atol=unit * np.sqrt(products))


def check(problem: ConvProblem, name: str, folder: Path, batch: int = 1) -> None:
    """Run a problem without epilogue on fresh random operands."""
    arrays = random_operands(problem, np.random.default_rng(), batch)
    assert_near(problem, run(problem, name, folder, arrays), reference(problem, arrays[0], arrays[1]))
