"""Attention as problems, run by their kernels and compared with float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import AttentionProblem, Epilogue, Operand
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.tir.attention.attention import attention_kernel

SYMBOLS = {"b": "s0", "m": "s1", "n": "s2"}
NAMES = ("b", "h", "g", "m", "n", "d", "e")


@dataclass
class Case:
    """Sizes and options of one attention.

    Attributes
    ----------
    sizes : dict
        By iteration dimension.
    scores : str
        Expression; x1 is the mask.
    mask : np.ndarray or None
        Of four dimensions; bool: where a score counts, float32: added.
    symbolic : bool
        Batch, queries and keys are symbolic.
    maps : tuple of str
        Index maps of query, key, value and result.
    starts : tuple of int
        Of each of the first three in its last dimension.
    dtype : str
        Of operands and result.
    """

    sizes: Mapping[str, int]
    scores: str = "multiply(x0, 0.25)"
    mask: np.ndarray | None = None
    causal: str = ""
    nan_to_zero: bool = False
    symbolic: bool = False
    maps: tuple[str, str, str, str] = ("b m h*d", "b n g*d", "b n g*e", "b m h*e")
    starts: tuple[int, int, int] = (0, 0, 0)
    dtype: str = "float32"
    arrays: list[np.ndarray] = field(default_factory=list)


def case(b: int, h: int, g: int, m: int, n: int, d: int, e: int, **options: Any) -> Case:
    return Case(dict(zip(NAMES, (b, h, g, m, n, d, e), strict=True)), **options)


def reference(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """(b, h, m, e) in float64 of (b, h, m, d), (b, g, n, d) and (b, g, n, e)."""
    share = case.sizes["h"] // case.sizes["g"]
    key, value = (np.repeat(x.astype("float64"), share, 1) for x in (key, value))
    scores = query.astype("float64") @ key.swapaxes(-1, -2) * 0.25
    if case.mask is not None:
        scores = np.where(case.mask, scores, -np.inf) if case.mask.dtype == bool else scores + case.mask
    m, n = case.sizes["m"], case.sizes["n"]
    if case.causal:
        ahead = n - m if case.causal == "bottom_right" else 0
        scores = np.where(np.arange(n) <= np.arange(m)[:, None] + ahead, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        powers /= powers.sum(-1, keepdims=True)
    if case.nan_to_zero:
        powers = np.where(np.isnan(powers), 0, powers)
    return powers @ value


def problem_of(case: Case) -> AttentionProblem:
    dims = {name: SYMBOLS.get(name, size) if case.symbolic else size for name, size in case.sizes.items()}
    operands = [
        _operand(text, dims, case.sizes, start, case.dtype)
        for text, start in zip(case.maps, (*case.starts, 0), strict=True)
    ]
    masks: tuple[Operand, ...] = ()
    if case.mask is not None:
        names = tuple(
            "1" if extent == 1 != case.sizes[name] else name
            for extent, name in zip(case.mask.shape, "bhmn", strict=True)
        )
        shape = tuple(1 if name == "1" else dims[name] for name in names)
        masks = (Operand(shape, str(case.mask.dtype), names, PackedLayout.identity(4)),)
    starts = tuple(
        (0,) * (len(text.split()) - 1) + (start,) for text, start in zip(case.maps[:3], case.starts, strict=True)
    )
    epilogue = Epilogue(Expression.parse(case.scores), masks)
    sizes = tuple((name, dims[name]) for name in NAMES)
    return AttentionProblem(*operands, starts, sizes, epilogue, case.causal, case.nan_to_zero)


def _operand(text: str, dims: Mapping[str, Any], sizes: Mapping[str, int], start: int, dtype: str) -> Operand:
    names = text.split()
    shape = []
    for position, name in enumerate(names):
        parts = name.split("*")
        extent = dims[parts[0]] if len(parts) == 1 else int(np.prod([sizes[part] for part in parts]))
        shape.append(extent + 2 * start if position == len(names) - 1 and start else extent)
    return Operand(tuple(shape), dtype, tuple(names), PackedLayout.identity(len(names)))


def stored(text: str, start: int, heads: np.ndarray, order: str) -> np.ndarray:
    """A tensor in which heads lie as a map says; what does not belong to it is NaN."""
    names = text.split()
    flat = [name for part in names for name in part.split("*")]
    moved = heads.transpose([order.index(name) for name in flat])
    shape, position = [], 0
    for part in names:
        count = len(part.split("*"))
        shape.append(int(np.prod(moved.shape[position : position + count])))
        position += count
    array = moved.reshape(shape)
    if start:
        array = np.pad(array, [(0, 0)] * (len(shape) - 1) + [(start, start)], constant_values=np.nan)
    return np.ascontiguousarray(array)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and the shape of the memory that it wants for itself."""

    executable: tvm.runtime.Executable
    scratch: Sequence[Any]


def compiled(case: Case, target: tvm.target.Target) -> Kernel:
    function = attention_kernel(problem_of(case), cpu_target_of(target))
    executable = tvm.compile(tvm.IRModule({"attention": function}), target=target)
    return Kernel(executable, function.params[-1].shape)


def check(
    case: Case,
    target: tvm.target.Target,
    rng: np.random.Generator,
    scale: float = 1.0,
    kernel: Kernel | None = None,
) -> None:
    """Run a kernel (its own, unless there is one already) on random operands, with NaN in what it must write."""
    s = case.sizes
    dtype = numpy_dtype(case.dtype)
    query = (rng.standard_normal((s["b"], s["h"], s["m"], s["d"])) * scale).astype(dtype).astype("float32")
    key = rng.standard_normal((s["b"], s["g"], s["n"], s["d"])).astype(dtype).astype("float32")
    value = rng.standard_normal((s["b"], s["g"], s["n"], s["e"])).astype(dtype).astype("float32")
    want = reference(case, query, key, value)
    kernel = compiled(case, target) if kernel is None else kernel
    orders = ("bhmd", "bgnd", "bgne")
    inputs = [
        stored(text, start, array, order).astype(dtype)
        for text, start, array, order in zip(case.maps, case.starts, (query, key, value), orders, strict=False)
    ]
    inputs += [] if case.mask is None else [case.mask]
    out = stored(case.maps[3], 0, np.full(want.shape, np.nan, "float32"), "bhme")
    result, scratch = tvm.runtime.tensor(out.astype(dtype)), nan_tensor(kernel.scratch)
    kernel.executable["attention"](*map(tvm.runtime.tensor, inputs), result, scratch)
    expected = stored(case.maps[3], 0, want, "bhme")
    tolerance = 1e-5 + _error_of_rounded_scores(case, query, key, value)
    unit = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]
    # Weights are rounded to the type, and then the result.
    actual = result.numpy().astype("float32")
    atol = tolerance + unit * float(np.abs(value).max())
    np.testing.assert_allclose(actual, expected, rtol=1e-4 + unit, atol=atol, equal_nan=True)


def _error_of_rounded_scores(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> float:
    """How far rounding of float32 scores alone can move a result.

    A sum of ``d`` products is off by at most ``d`` roundings of the sum of their absolute values, a power of e by the
    same as a ratio, and an average by twice that of its largest term: scores in the hundreds leave few digits.
    """
    share = case.sizes["h"] // case.sizes["g"]
    sums = np.abs(query) @ np.repeat(np.abs(key), share, 1).swapaxes(-1, -2) * 0.25
    return float(2 * case.sizes["d"] * 2.0**-24 * sums.max(initial=0.0) * np.abs(value).max(initial=0.0))


def nan_tensor(shape: Sequence[Any]) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.full([int(extent) for extent in shape], np.nan, "float32"))
