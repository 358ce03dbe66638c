"""Matrix products through the whole pipeline, against float64 and exact integers: shapes, types, targets, epilogues."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

import relax_hetero as rh
from marks import in_turns
from relax_hetero.target.cpu_target import cpu_target_of

pytestmark = pytest.mark.sampled(6)

SHAPES = [
    *((size, size, size) for size in range(1, 10)),
    (15, 37, 7),
    (7, 33, 17),
    (127, 255, 511),
    (457, 330, 512),
    (1, 1000, 1000),
    (1000, 1000, 1),
    (1000, 1, 1000),
    (2, 130, 65),
    (4, 66, 129),
    (33, 3, 100),
    (3, 0, 5),
]
"""(m, k, n)"""

TARGETS = {
    "native": lambda: rh.native("llvm"),
    "avx2": lambda: {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2},
    "generic": lambda: {"kind": "llvm"},
}

# Left and right operand, and the type of the product.
TYPES = {
    "f32": ("float32", "float32", "float32"),
    "f64": ("float64", "float64", "float64"),
    "f16": ("float16", "float16", "float16"),
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "bf16_f32": ("bfloat16", "bfloat16", "float32"),
    "u8s8": ("uint8", "int8", "int32"),
    "s8s8": ("int8", "int8", "int32"),
}

_UNIT_ROUNDOFF = {"float32": 2**-24, "float64": 2**-53, "float16": 2**-11, "bfloat16": 2**-8}
_HAS_SHORT_SUMS = "avx512fp16" in cpu_target_of(rh.native("llvm")).features


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def added(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A bias or residual."""
    if dtype == "int32":
        return rng.integers(-(10**5), 10**5, shape, dtype=dtype)
    return random_array(rng, shape, dtype)


def product(builder: relax.BlockBuilder, a: relax.Expr, b: relax.Expr, out: str) -> relax.Expr:
    """Product as importers write it: integers are widened first."""
    if out == "int32":
        a, b = (builder.emit(relax.op.astype(value, "int32")) for value in (a, b))
    return builder.emit(relax.op.matmul(a, b, out_dtype=out))


def with_epilogue(builder: relax.BlockBuilder, y: relax.Expr, bias: relax.Expr, residual: relax.Expr) -> relax.Expr:
    y = builder.emit(relax.op.add(y, bias))
    if y.ty.dtype == "int32":
        return builder.emit(relax.op.maximum(y, residual))
    return builder.emit(relax.op.add(builder.emit(relax.op.nn.relu(y)), residual))


def reference(a, b, bias=None, residual=None):
    wide = np.int64 if a.dtype.kind in "iu" else np.float64
    y = a.astype(wide) @ b.astype(wide)
    if bias is None:
        return y
    y = y + bias.astype(wide)
    return np.maximum(y, residual.astype(wide)) if wide is np.int64 else np.maximum(y, 0) + residual.astype(wide)


def check(got: np.ndarray, want: np.ndarray, k: int, dtype: str, what: str) -> None:
    assert got.shape == want.shape, what
    if dtype == "int32":
        np.testing.assert_array_equal(got.astype(np.int64), want, err_msg=what)
        return
    roundings = _UNIT_ROUNDOFF[dtype] if dtype in ("float16", "bfloat16") else 0.0
    # With an epilogue in a narrow type, every op of it rounds; short sums of float16 round about 1.5 times a term
    # (docs/explanation/precision.md), in one of a thousand results four times as much.
    terms = 12 if dtype == "float16" and _HAS_SHORT_SUMS else 4
    bound = 1e-5 * math.sqrt(max(k, 1)) + roundings * (4 * np.abs(want) + terms * math.sqrt(max(k, 1)))
    error = np.abs(got.astype(np.float64) - want)
    assert np.isfinite(got.astype(np.float64)).all(), what
    assert (error <= bound).all(), f"{what}: error {error.max()}"


@dataclass(frozen=True)
class Case:
    """One product: sizes (a symbol's name where dynamic), with bias and residual or without, weight constant or not."""

    shape: tuple[int | str, int | str, int | str]
    epilogue: bool
    constant: bool


@dataclass(frozen=True)
class Inputs:
    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray
    residual: np.ndarray


def random_inputs(rng: np.random.Generator, shape: tuple[int, int, int], types: tuple[str, str, str]) -> Inputs:
    (m, k, n), (lhs, rhs, out) = shape, types
    arrays = random_array(rng, (m, k), lhs), random_array(rng, (k, n), rhs)
    return Inputs(*arrays, added(rng, (n,), out), added(rng, (m, n), out))


def add_function(
    builder: relax.BlockBuilder, name: str, case: Case, types: tuple[str, str, str], weight: np.ndarray | None
) -> None:
    lhs, rhs, out = types
    symbols = {d: tirx.Var(d, "int64") for d in case.shape if isinstance(d, str)}
    m, k, n = (symbols.get(d, d) for d in case.shape)
    a = relax.Var("a", relax.TensorType((m, k), lhs))
    b = relax.Var("b", relax.TensorType((k, n), rhs)) if weight is None else relax.const(weight, rhs)
    bias, residual = relax.Var("bias", relax.TensorType((n,), out)), relax.Var("r", relax.TensorType((m, n), out))
    params = [a, *([b] if weight is None else []), *([bias, residual] if case.epilogue else [])]
    with builder.function(name, params):
        with builder.dataflow():
            y = product(builder, a, b, out)
            result = builder.emit_output(with_epilogue(builder, y, bias, residual) if case.epilogue else y)
        builder.emit_func_output(result)


def run_cases(types: tuple[str, str, str], target, cases: list[Case], shapes: list[list[tuple]], seed: int) -> None:
    """Compile a function for each case in one module, and run it on the shapes given for it."""
    rng = np.random.default_rng(seed)
    inputs = [[random_inputs(rng, shape, types) for shape in of_case] for of_case in shapes]
    builder = relax.BlockBuilder()
    for index, case in enumerate(cases):
        add_function(builder, f"f{index}", case, types, inputs[index][0].b if case.constant else None)
    mod = builder.get()
    mod.update_global_info("vdevice", [rh.VDevice(target)])
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for index, case in enumerate(cases):
        for x in inputs[index]:
            added_to = [x.bias, x.residual] if case.epilogue else []
            got = vm[f"f{index}"](x.a, *([] if case.constant else [x.b]), *added_to).numpy()
            check(got, reference(x.a, x.b, *added_to), x.a.shape[1], types[2], f"{types} {case} {x.a.shape}")


@pytest.mark.parametrize(("types", "target"), in_turns(TYPES, TARGETS))
def test_static_shapes(types, target):
    shapes = SHAPES if types == "f32" else SHAPES[::2] if target == "native" else SHAPES[1::4]
    cases = [Case(shape, epilogue=i % 2 == 0, constant=i % 3 != 0) for i, shape in enumerate(shapes)]
    run_cases(TYPES[types], TARGETS[target](), cases, [[shape] for shape in shapes], seed=1)


@pytest.mark.parametrize(("types", "target"), in_turns(TYPES, TARGETS))
def test_dynamic_shapes(types, target):
    cases = [Case(("m", "k", "n"), epilogue, constant=False) for epilogue in (False, True)]
    run_cases(TYPES[types], TARGETS[target](), cases, [SHAPES, SHAPES], seed=2)


@pytest.mark.parametrize("types", TYPES)
def test_dynamic_rows_of_a_weight(types):
    """The usual symbolic batch: one weight, a kernel that chooses its narrow form at run time."""
    rows = [0, 1, 2, 3, 4, 5, 8, 9, 31, 130]
    cases = [Case(("m", k, n), epilogue=k > 40, constant=False) for k, n in [(64, 96), (37, 51)]]
    run_cases(TYPES[types], rh.native("llvm"), cases, [[(m, *c.shape[1:]) for m in rows] for c in cases], seed=3)


_sizes = st.integers(1, 70) | st.sampled_from([96, 127, 128, 129, 200])


@settings(max_examples=6)
@given(
    shapes=st.lists(st.tuples(_sizes, _sizes, _sizes, st.booleans(), st.booleans()), min_size=3, max_size=6),
    types=st.sampled_from(sorted(TYPES)),
    target=st.sampled_from(sorted(TARGETS)),
    seed=st.integers(0, 1000),
)
def test_random_shapes(shapes, types, target, seed):
    cases = [Case((m, k, n), epilogue, constant) for m, k, n, epilogue, constant in shapes]
    run_cases(TYPES[types], TARGETS[target](), cases, [[case.shape] for case in cases], seed)
