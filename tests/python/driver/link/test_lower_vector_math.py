"""Functions of vectors in kernels that no generator wrote: near float64 everywhere, and no calls into the C library."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
import tvm
from tvm import runtime, tirx
from tvm.script import ir as I
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as build_tir
from tvm_ffi import structural_walk

from relax_hetero.driver.link.link import build_group
from relax_hetero.driver.link.llvm_kernels import LowerVectorMath
from relax_hetero.tir.core.builder import Function, lane_indices, loop
from seeds import fresh_rng
from tir.kernel_runs import CALL, VECTOR_INSTRUCTION, VECTOR_NAMES, cpu_named, poisoned, target_of

SIZE = 1 << 15
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1e-38, -1.1e-38, 3.4028235e38, -3.4028235e38, 1.0, -1.0]
    + [88.72, 88.73, -87.4, -103.9, -104.5, 0.70710677, 0.625, 0.92, 3.93, 127.99, 128.0, -126.5, -149.5, -150.5]
    + [38.53, 38.54, -37.9, -45.1, 89.4, 89.42, 0.5, 2.0, 8.0, 0.41421357, 2.4142137, 1e5, -1e7, 1.048576e6, 1e30],
    "float32",
)


def _erf(x):
    return np.vectorize(math.erf, otypes=[float])(x)


# In float64; float32 may be off by 4 units in the last place.
REFERENCES = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "exp2": np.exp2,
    "exp10": lambda x: np.power(10.0, x),
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
}
FUNCTIONS = [*REFERENCES, "pow"]
# These ask the C library where a vector holds an argument beyond 2^20.
PERIODIC = ("sin", "cos", "tan")


@I.ir_module
class Before:
    @T.prim_func
    def main(a: T.Buffer((32,), "float32"), b: T.Buffer((32,), "float32")):
        for i in range(2):
            b[T.Ramp(i * 16, 1, 16)] = T.exp(a[T.Ramp(i * 16, 1, 16)]) + T.exp(b[T.Ramp(i * 16, 1, 16)])
        b[0] = T.exp(a[1])

    @T.prim_func
    def halves(a: T.Buffer((16,), "float16"), b: T.Buffer((16,), "float64")):
        a[T.Ramp(0, 1, 16)] = T.tanh(a[T.Ramp(0, 1, 16)])
        b[T.Ramp(0, 1, 16)] = T.tanh(b[T.Ramp(0, 1, 16)])


def _lowered() -> tuple[str, str]:
    after = LowerVectorMath()(Before)
    return after["main"].script(), after["halves"].script()


def test_calls_of_vectors_and_scalars_become_one_imported_function_each():
    main, _ = _lowered()
    assert main.count("pragma_import_llvm") == 2
    assert 'T.Shuffle([T.call_pure_extern("float32x4", "relax_hetero.exp.4", T.Broadcast(a[1], 4))], [0])' in main
    calls = re.findall(r'T\.call_pure_extern\("float32x16", "relax_hetero\.exp\.16", (\w)\[T\.Ramp\(i \* 16', main)
    assert calls == ["a", "b"]


def test_halves_are_computed_in_float32_and_doubles_left_alone():
    _, halves = _lowered()
    assert 'T.Cast("float16x16", T.call_pure_extern("float32x16", "relax_hetero.tanh.16", T.Cast("float32x16"' in halves
    assert "T.tanh(b[" in halves


def test_lowered_functions_stay():
    after = LowerVectorMath()(Before)
    again = LowerVectorMath()(after)
    for name in ("main", "halves"):
        assert again[name].same_as(after[name])


def _kernel(name: str, lanes: int, dtype: str = "float32") -> tirx.PrimFunc:
    function = Function(name)
    with function:
        sources = [function.argument(f"source_{i}", [SIZE], dtype) for i in range(2 if name == "pow" else 1)]
        destination = function.argument("destination", [SIZE], dtype)
        with function.body(), loop(SIZE // lanes) as i:
            index = lane_indices(i * lanes, lanes)
            value = getattr(build_tir, name)(*[source[index] for source in sources])
            build_tir.buffer_store(destination, value, [index])
    return function.result


def _built(target: str, dtype: str = "float32") -> runtime.Module:
    functions = {name: _kernel(name, cpu_named(target).lanes("float32"), dtype) for name in FUNCTIONS}
    return build_group(target_of(target), tvm.IRModule(functions), target_of(target))


@cache
def _inputs() -> np.ndarray:
    rng = fresh_rng()
    parts = [
        SPECIAL,
        rng.integers(0, 2**32, SIZE // 4, dtype=np.uint32).view("float32"),
        rng.uniform(-125, 130, SIZE // 4),
        rng.normal(size=SIZE // 4),
    ]
    parts.append(rng.uniform(-10, 10, SIZE - sum(map(len, parts))))
    with np.errstate(invalid="ignore"):
        return np.concatenate([np.asarray(part, "float32") for part in parts])


@pytest.fixture(scope="module", params=VECTOR_NAMES)
def library(request):
    return _built(request.param)


def _results(library: runtime.Module, name: str, *operands: np.ndarray) -> np.ndarray:
    out = poisoned([SIZE], str(operands[0].dtype))
    library[name](*[runtime.tensor(operand) for operand in operands], out)
    return out.numpy()


def check(actual: np.ndarray, expected: np.ndarray, operands: list[np.ndarray], limit: float) -> None:
    with np.errstate(all="ignore"):
        rounded = expected.astype("float32")
        unit = np.spacing(np.where(np.isfinite(rounded), np.abs(rounded), 1)).astype("float64")
        exact = (np.isnan(actual) & np.isnan(expected)) | (np.isinf(rounded) & (actual == rounded))
        errors = np.where(exact, 0, np.abs(actual.astype("float64") - expected) / unit)
    errors[np.isnan(errors)] = np.inf
    worst = int(errors.argmax())
    inputs = [operand[worst] for operand in operands]
    assert errors[worst] <= limit, f"{errors[worst]} ulp at {inputs!r}: {actual[worst]!r}, not {expected[worst]!r}"


@pytest.mark.parametrize("name", REFERENCES)
def test_within_four_units_in_the_last_place(library, name):
    actual = _results(library, name, _inputs())
    with np.errstate(all="ignore"):
        expected = REFERENCES[name](_inputs().astype("float64"))
    check(actual, expected, [_inputs()], 4)
    tiny = (expected != 0) & (np.abs(expected) < 1e-44)  # may be rounded to zero, of either sign
    signed = ~np.isnan(expected) & ~tiny
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


@pytest.mark.parametrize("target", VECTOR_NAMES)
def test_halves(target):
    library = _built(target, "float16")
    x = fresh_rng().integers(0, 2**16, SIZE, dtype=np.uint16).view("float16")
    with np.errstate(all="ignore"):
        for name, reference in REFERENCES.items():
            expected = reference(x.astype("float64")).astype("float16")
            actual = _results(library, name, x)
            np.testing.assert_allclose(actual.astype("float64"), expected.astype("float64"), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("target", VECTOR_NAMES)
def test_doubles(target):
    library = _built(target, "float64")
    x = fresh_rng().uniform(-2, 2, SIZE)
    with np.errstate(all="ignore"):
        for name, reference in REFERENCES.items():
            np.testing.assert_allclose(_results(library, name, x), reference(x), rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("lanes", [2, 32, 64])
def test_any_number_of_lanes(lanes):
    target = target_of(VECTOR_NAMES[0])
    functions = {name: _kernel(name, lanes) for name in FUNCTIONS}
    library = build_group(target, tvm.IRModule(functions), target)
    for name, reference in REFERENCES.items():
        with np.errstate(all="ignore"):
            check(_results(library, name, _inputs()), reference(_inputs().astype("float64")), [_inputs()], 4)


def _bases() -> np.ndarray:
    """Bases with special powers, and as many exponents."""
    rng = fresh_rng()
    special = np.append(SPECIAL, [3.0, -3.0, -2.0, -0.5, 16777215.0, 16777216.0, -16777217.0]).astype("float32")
    crossed = np.stack([np.repeat(special, len(special)), np.tile(special, len(special))])
    rest = SIZE - crossed.shape[1]
    random = rng.integers(0, 2**32, (2, rest), dtype=np.uint32).view("float32")
    random[:, : rest // 2] = [rng.lognormal(size=rest // 2), rng.normal(size=rest // 2) * 30]
    random[:, : rest // 4] = [-rng.lognormal(size=rest // 4), rng.integers(-40, 40, rest // 4)]
    return np.concatenate([crossed, random], axis=1)


def test_powers(library):
    x, y = _bases()
    actual = _results(library, "pow", x, y)
    with np.errstate(all="ignore"):
        expected = np.power(x.astype("float64"), y.astype("float64"))
    check(actual, expected, [x, y], 4)
    signed = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


def test_squares_and_cubes_are_products():
    @I.ir_module
    class Powers:
        @T.prim_func
        def main(a: T.Buffer((16,), "float32")):
            a[T.Ramp(0, 1, 16)] = T.pow(a[T.Ramp(0, 1, 16)], T.Broadcast(T.float32(2), 16))
            a[T.Ramp(0, 1, 16)] = T.pow(a[T.Ramp(0, 1, 16)], T.Broadcast(T.float32(3), 16))

    imported: list[str] = []
    on_attr = (tirx.AttrStmt, lambda attr: imported.append(str(attr.value.value)))
    structural_walk(LowerVectorMath()(Powers)["main"].body, on_attr)
    assert sorted(re.findall(r"@relax_hetero\.(\w+)", "".join(imported))) == ["cube", "square"]
    assert all("fmul" in text and "call" not in text for text in imported)


@pytest.mark.parametrize("target", VECTOR_NAMES)
def test_no_calls(target):
    text = _built(target).inspect_source("asm")
    for name in FUNCTIONS:
        body = text[text.index(f"\n{name}_compute_:") :]
        body = body[: body.index(".cfi_endproc")]
        called = set(re.findall(CALL, body))
        assert called <= {f"{name}f"} if name in PERIODIC else not called, name
        assert re.search(VECTOR_INSTRUCTION[target], body), name
