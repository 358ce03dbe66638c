"""Products as problems for GPUs, run by the interpreter of GPU kernels and compared with float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import tirx

from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand
from relax_hetero.target.element_types import bytes_of, numpy_dtype
from relax_hetero.tir.commands.table_kernel import is_one_launch
from seeds import fresh_rng
from tir.kernel_runs import in_double, poisoned

SYMBOLS = {"b0": "s0", "b1": "s1", "m": "s2", "n": "s3", "k": "s4"}
Spec = tuple[Sequence[str], str]
"""An operand of an epilogue: its dimensions and element type."""


def operand_of(
    names: Sequence[str],
    dtype: str,
    sizes: dict[str, int],
    layout: PackedLayout | None = None,
    symbolic: Sequence[str] = (),
) -> Operand:
    """An operand along dimensions of `sizes` ("1": broadcast), row-major unless a layout is given."""
    shape = tuple(SYMBOLS[n] if n in symbolic else sizes.get(n, 1) for n in names)
    return Operand(shape, dtype, tuple(names), layout or PackedLayout.identity(len(names)))


def tensor_core_layout(index_map: Sequence[str], dtype: str) -> PackedLayout:
    """The packed layout of a right operand of tensor cores."""
    k, n = index_map.index("k"), index_map.index("n")
    batch = [d for d in range(len(index_map)) if d not in (k, n)]
    return PackedLayout((*batch, n, k), (n, k), (64, 128 // bytes_of(dtype)), swizzle=True)


def product(
    sizes: dict[str, int],
    types: Sequence[str] = ("float32", "float32", "float32"),
    result: str = "",
    maps: Sequence[Sequence[str]] = ("mk", "kn", "mn"),
    epilogue: str = "",
    operands: Sequence[Spec] = (),
    init: Sequence[str] | None = None,
    symbolic: Sequence[str] = (),
    packed: bool = False,
    layouts: Sequence[PackedLayout | None] = (None, None, None),
) -> MatmulProblem:
    """A product of element types (lhs, rhs, sums), operands over the dimensions `maps`; float32 may be rounded."""
    left, right, acc = types
    result = result or acc
    if not epilogue and result != acc:
        epilogue = f"cast(x0, '{result}')"
    extra = tuple(operand_of(names, dtype, sizes, None, symbolic) for names, dtype in operands)
    of_right = tensor_core_layout(maps[1], right) if packed else layouts[1]
    return MatmulProblem(
        operand_of(maps[0], left, sizes, layouts[0], symbolic),
        operand_of(maps[1], right, sizes, of_right, symbolic),
        operand_of(maps[2], result, sizes, layouts[2], symbolic),
        acc,
        None if init is None else operand_of(init, acc, sizes, None, symbolic),
        Epilogue(Expression.parse(epilogue), extra) if epilogue else None,
        tf32=left == "float32",
    )


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Numbers of an element type; integers small enough for exact sums."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return rng.integers(0 if dtype.startswith("u") else -100, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype(dtype))


def check(problem: MatmulProblem, kernel: tirx.PrimFunc, sizes: dict[str, int], is_rounded: bool = False) -> None:
    """Run a kernel of one launch and compare it with float64; storage of the result is poisoned before.

    `is_rounded`: float32 operands are rounded to 10 bits.
    """
    assert is_one_launch(kernel)
    rng = fresh_rng()
    result = problem.result
    logical, stored = [], []
    for operand in problem.parameters[:-1]:
        array = random_array(rng, [sizes.get(name, 1) for name in operand.index_map], operand.dtype)
        stored.append(np.ascontiguousarray(operand.layout.pack(array)) if array.ndim else array)
        exact = "bool" if operand.dtype == "bool" else "int64" if "int" in operand.dtype else "float64"
        logical.append((array.astype(exact), operand.index_map))
    letters = {name: chr(97 + i) for i, name in enumerate(["1", *sizes])}

    def subscripts(index_map: Sequence[str]) -> str:
        return "".join(letters[name] for name in index_map if name != "1")

    def squeezed(number: int) -> np.ndarray:
        array, index_map = logical[number]
        return array.reshape([size for size, name in zip(array.shape, index_map, strict=True) if name != "1"])

    def like_result(number: int) -> np.ndarray:
        own = [name for name in logical[number][1] if name != "1"]
        order = [name for name in result.index_map if name in own]
        array = squeezed(number).transpose([own.index(name) for name in order])
        return array.reshape([sizes[name] if name in own else 1 for name in result.index_map])

    maps = [operand.index_map for operand in (problem.lhs, problem.rhs, result)]
    sides = ",".join(subscripts(index_map) for index_map in maps[:2])
    want = np.einsum(f"{sides}->{subscripts(maps[2])}", squeezed(0), squeezed(1))
    extra = [like_result(i) for i in range(2, len(logical))]
    if problem.init is not None:
        want = want + extra.pop(0)
    if problem.epilogue is not None:
        want = in_double(problem.epilogue.expression, [want, *extra])
    shape = [sizes[name] for name in result.index_map]
    out = poisoned(result.layout.packed_shape(shape), result.dtype).numpy()
    run(kernel, *stored, out)
    got = result.layout.unpack(out, shape)
    if "int" in result.dtype:
        np.testing.assert_array_equal(got, want)
        return
    is_double = result.dtype == problem.acc_dtype == "float64"
    rounding = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(result.dtype, 1e-14 if is_double else 1e-6)
    sums = 2.0**-9 if is_rounded else 1e-14 if is_double else 1e-6
    atol = (sums + rounding) * 4 * math.sqrt(sizes["k"] + 1)
    np.testing.assert_allclose(got.astype("float64"), want, rtol=2 * rounding, atol=atol)
