"""Convolutions as problems, run by their kernels and compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import tvm

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.encoding import CONVOLUTIONS, RHS, ConvAttrs, Encoding, conv_maps
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Dim, Epilogue, Operand, Window
from relax_hetero.resolvers.cpu_resolver import conv_layout
from relax_hetero.target.cpu_target import CpuTarget
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.kernel_runs import cpu_named, kernel, poisoned, stored
from tir.products_of import random_array


def channels_last(rank: int) -> PackedLayout:
    """Layout NHWC of an operand with logical dimensions NCHW."""
    return PackedLayout((0, *range(2, rank), 1))


def conv_problem(
    cpu: str | CpuTarget,
    channels: tuple[int, int],
    extents: Sequence[int],
    windows: Sequence[Window],
    groups: int = 1,
    batch: Dim = 1,
    dtype: str | tuple[str, str, str] = "float32",
    data_layout: PackedLayout | None = None,
) -> ConvProblem:
    """`channels` are those of the data and of the result; data and result are stored channels-last.

    `cpu` decides how the weight is packed; `dtype` is that of everything, or those of data, weight and
    accumulators, which are the result.
    """
    types = (dtype,) * 3 if isinstance(dtype, str) else dtype
    ins, outs = channels
    rank = len(extents) + 2
    places = tuple(window.output_extent(extent) for window, extent in zip(windows, extents, strict=True))
    weight = (outs, ins // groups, *(window.size for window in windows))
    shapes = ((batch, ins, *extents), weight, (batch, outs, *places))
    maps = conv_maps(len(extents))
    layouts = (data_layout or channels_last(rank), weight_layout(cpu, types, shapes, windows, groups))
    operands = [Operand(*operand) for operand in zip(shapes, types, maps, (*layouts, channels_last(rank)), strict=True)]
    return ConvProblem(*operands, types[2], tuple(windows), groups)


def weight_layout(
    cpu: str | CpuTarget,
    types: tuple[str, str, str],
    shapes: Sequence[Sequence[Dim]],
    windows: Sequence[Window],
    groups: int,
) -> PackedLayout:
    """How a weight is packed for a machine, or for one by name."""
    maps = conv_maps(len(windows))
    sizes = {
        dim: -1 if isinstance(extent, str) else extent
        for names, shape in zip(maps, shapes, strict=True)
        for dim, extent in zip(names, shape, strict=True)
    }
    padding = (*(w.before for w in windows), *(w.after for w in windows))
    conv = ConvAttrs(tuple(w.stride for w in windows), padding, tuple(w.dilation for w in windows), groups)
    encoding = Encoding(CONVOLUTIONS[len(windows) - 1], RHS, types, maps, tuple(sizes.items()), conv, "exact")
    layout = conv_layout(encoding, cpu_named(cpu) if isinstance(cpu, str) else cpu)
    assert layout is not None
    return layout


def with_epilogue(
    problem: ConvProblem, expression: str, *shown: str, dtype: str = "", result_dtype: str = ""
) -> ConvProblem:
    """`shown` says for each operand which dimensions of the result it has: "n" a bias, "bny" all of them.

    Operands are of `dtype`, that of the accumulators if empty, and so is the result of `result_dtype`.
    """
    names, rank = problem.result.index_map, len(problem.result.index_map)
    operands = []
    for dims in shown:
        index_map = tuple(name if name[0] in dims else "1" for name in names)
        shape = tuple(size if name[0] in dims else 1 for size, name in zip(problem.result.shape, names, strict=True))
        layout = channels_last(rank) if "y" in dims else PackedLayout.identity(rank)
        operands.append(Operand(shape, dtype or problem.result.dtype, index_map, layout))
    result = replace(problem.result, dtype=result_dtype or problem.result.dtype)
    return replace(problem, result=result, epilogue=Epilogue(Expression.parse(expression), tuple(operands)))


def reference(problem: ConvProblem, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The sums of products, without the epilogue, in float64."""
    windows, groups = problem.windows, problem.groups
    padded = np.pad(data.astype("float64"), [(0, 0), (0, 0), *((w.before, w.after) for w in windows)])
    places = [w.output_extent(extent) for w, extent in zip(windows, data.shape[2:], strict=True)]
    total = np.zeros((len(data), groups, weight.shape[0] // groups, int(np.prod(places))))
    for taps in np.ndindex(*weight.shape[2:]):
        cut = tuple(
            slice(tap * w.dilation, tap * w.dilation + (count - 1) * w.stride + 1, w.stride)
            for tap, w, count in zip(taps, windows, places, strict=True)
        )
        patches = padded[(slice(None), slice(None), *cut)].reshape(
            total.shape[0], groups, weight.shape[1], total.shape[-1]
        )
        factors = weight[(slice(None), slice(None), *taps)].astype("float64").reshape(groups, -1, weight.shape[1])
        total += np.einsum("bgkp,gnk->bgnp", patches, factors)
    return total.reshape(len(data), weight.shape[0], *places)


def random_operands(problem: ConvProblem, rng: np.random.Generator, batch: int = 1) -> list[np.ndarray]:
    """All but the result; a symbolic batch is `batch`."""
    shapes = [[batch if isinstance(dim, str) else dim for dim in operand.shape] for operand in problem.parameters[:-1]]
    return [random_array(rng, s, operand.dtype) for s, operand in zip(shapes, problem.parameters, strict=False)]


@cache
def _kernel(problem: ConvProblem, name: str, folder: Path) -> Callable[..., None]:
    return kernel(conv_kernel(problem, cpu_named(name)), name, folder)


def run(problem: ConvProblem, name: str, folder: Path, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The result, whose storage is poisoned before; so is the padding of operands, but for that along the sums."""

    def as_stored(operand: Operand, array: np.ndarray) -> np.ndarray:
        return operand.layout.pack(array) if 1 in operand.layout.inner_dims else stored(array, operand.layout)

    pairs = zip(problem.parameters[:-1], arrays, strict=True)
    tensors = [tvm.runtime.tensor(as_stored(operand, array)) for operand, array in pairs]
    shape = (len(arrays[0]), *(int(extent) for extent in problem.result.shape[1:]))
    out = poisoned(problem.result.layout.packed_shape(shape), problem.result.dtype)
    _kernel(problem, name, folder)(*tensors, out)
    return problem.result.layout.unpack(out.numpy(), shape)


def assert_near(problem: ConvProblem, got: np.ndarray, want: np.ndarray) -> None:
    """Within 2e-5 times the root of the products of a sum, 1e-13 for float64; integers are exact."""
    unit = {"float32": 2e-5, "float64": 1e-13}.get(problem.acc_dtype, 0)
    products = np.prod([int(extent) for extent in problem.weight.shape[1:]])
    np.testing.assert_allclose(got.astype("float64"), want, rtol=0, atol=unit * np.sqrt(products))


def check(problem: ConvProblem, name: str, folder: Path, batch: int = 1) -> None:
    """Run a problem without epilogue on fresh random operands."""
    arrays = random_operands(problem, fresh_rng(), batch)
    assert_near(problem, run(problem, name, folder, arrays), reference(problem, arrays[0], arrays[1]))
