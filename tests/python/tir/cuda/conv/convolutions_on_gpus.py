"""Convolutions as problems for GPUs, in the layouts that the resolver gives them, and their results in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tvm.target import Target

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.encoding import CONVOLUTIONS, ConvAttrs, Encoding, conv_maps
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Dim, Epilogue, Operand, Window
from relax_hetero.resolvers.cuda_resolver import conv_layout
from relax_hetero.target.element_types import TF32, numpy_dtype, stored_type
from relax_hetero.target.gpu_target import gpu_target_of
from tir.convolutions_of import reference
from tir.kernel_runs import in_double

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)
ACCUMULATORS = {"float16": "float32", "bfloat16": "float32", TF32: "float32", "int8": "int32", "uint8": "int32"}


def conv_problem(
    channels: tuple[int, int],
    extents: Sequence[int],
    windows: Sequence[Window] | Window,
    batch: Dim = 1,
    groups: int = 1,
    dtype: str = "float16",
    result: str = "",
    epilogue: str = "",
    shown: Sequence[tuple[str, str]] = (),
    gpu=GPU,
) -> ConvProblem:
    """`channels` are those of data and result.

    `shown` says for each operand of the epilogue which dimensions it has ("n" a bias, "bny" all) and its type.
    """
    windows = [windows] * len(extents) if isinstance(windows, Window) else list(windows)
    ins, outs = channels
    tf32, acc = dtype == TF32, ACCUMULATORS.get(dtype, dtype)
    types = (dtype, "int8" if dtype == "uint8" else dtype, acc)
    dtype = stored_type(dtype)
    places = tuple(window.output_extent(extent) for window, extent in zip(windows, extents, strict=True))
    weight = (outs, ins // groups, *(window.size for window in windows))
    shapes = ((batch, ins, *extents), weight, (batch, outs, *places))
    maps = conv_maps(len(extents))
    sizes = {
        name: -1 if isinstance(size, str) else size
        for names, shape in zip(maps, shapes, strict=True)
        for name, size in zip(names, shape, strict=True)
    }
    padding = (*(w.before for w in windows), *(w.after for w in windows))
    conv = ConvAttrs(tuple(w.stride for w in windows), padding, tuple(w.dilation for w in windows), groups)
    encoding = Encoding(CONVOLUTIONS[len(windows) - 1], 0, types, maps, tuple(sizes.items()), conv)
    layouts = [conv_layout(encoding.of(i), gpu) for i in range(3)]
    assert None not in layouts, encoding
    operands = [Operand(*each) for each in zip(shapes, map(stored_type, types), maps, layouts, strict=True)]
    problem = ConvProblem(*operands, acc, tuple(windows), groups, tf32=tf32)
    result = result or (dtype if "float" in dtype else acc)
    if not epilogue and result != acc:
        epilogue = f"cast(x0, '{result}')"
    if not epilogue:
        return problem
    names, shape = problem.result.index_map, problem.result.shape
    extra = []
    for dims, element in shown:
        index_map = tuple(name if name[0] in dims else "1" for name in names)
        extent = tuple(size if name[0] in dims else 1 for size, name in zip(shape, names, strict=True))
        layout = problem.result.layout if "y" in dims else PackedLayout.identity(len(names))
        extra.append(Operand(extent, element, index_map, layout))
    return replace(
        problem,
        result=replace(problem.result, dtype=result),
        epilogue=Epilogue(Expression.parse(epilogue), tuple(extra)),
    )


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Small numbers of a type."""
    if "int" in dtype:
        return rng.integers(0 if dtype[0] == "u" else -100, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def operands_of(problem: ConvProblem, rng: np.random.Generator, batch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Random operands as they are stored, and the result in float64; a symbolic batch is `batch`."""
    logical = [
        random_array(rng, [batch if isinstance(dim, str) else dim for dim in operand.shape], operand.dtype)
        for operand in problem.parameters[:-1]
    ]
    stored = [operand.layout.pack(array) for operand, array in zip(problem.parameters, logical, strict=False)]
    want = reference(problem, logical[0], logical[1])
    if problem.epilogue is not None:
        want = in_double(problem.epilogue.expression, [want, *logical[2:]])
    return stored, want


def assert_near(problem: ConvProblem, got: np.ndarray, want: np.ndarray) -> None:
    """Integers exactly; floats within roundings of the result, and of the sums of products."""
    if "int" in problem.result.dtype:
        np.testing.assert_array_equal(got, want)
        return
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(problem.result.dtype, 1e-6)
    products = float(np.prod([int(extent) for extent in problem.weight.shape[1:]]))
    sums = (2.0**-7 if problem.tf32 else 1e-5) * products**0.5
    np.testing.assert_allclose(got.astype("float64"), want, rtol=2 * rounding, atol=2 * rounding + sums)
