"""float32 functions against float64, everywhere in float32, and as the vector code that they are for."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
from tvm import runtime, tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.tir.core.builder import Function, lane_indices, loop
from relax_hetero.tir.math import vector_math
from tir.kernel_runs import CALL, NAMES, VECTOR_INSTRUCTION, VECTOR_NAMES, assembly, built, cpu_named, poisoned

SIZE = 1 << 14
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1e-38, -1.1e-38, 3.4028235e38, -3.4028235e38, 1.0, -1.0]
    + [88.72, 88.73, -87.4, -103.9, -104.5, 0.70710677, 0.625, 0.92, 3.93, -9.1, -112.5, -200.0],
    "float32",
)


def _erf(x):
    return np.vectorize(math.erf, otypes=[float])(x)


def _half_erfc(x):
    return np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)) / 2


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x):
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


# The function in float64, and how far from it float32 may be, in units in the last place.
REFERENCES = {
    "exp": (np.exp, 2),
    "log": (np.log, 2),
    "tanh": (np.tanh, 2),
    "erf": (_erf, 2),
    "sigmoid": (_sigmoid, 4),
    "silu": (lambda x: x * _sigmoid(x), 4),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
}
# As above, in units in the last place of the argument.
LOOSE_REFERENCES = {"gelu": (lambda x: x * _half_erfc(x), 4), "gelu_tanh": (_gelu_tanh, 4)}
# As above, absolute, in units of 2^-23.
ABSOLUTE_REFERENCES = {"quick_tanh": (np.tanh, 2), "quick_sigmoid": (_sigmoid, 2)}


def _named(name: str):
    return getattr(vector_math, name)


def _function(name: str, lanes: int) -> tirx.PrimFunc:
    function = Function(name)
    with function:
        source = function.argument("source", [SIZE], "float32")
        destination = function.argument("destination", [SIZE], "float32")
        with function.body(), loop(SIZE // lanes) as i:
            index = lane_indices(i * lanes, lanes)
            T.buffer_store(destination, _named(name)(source[index]), [index])
    return function.result


@cache
def _inputs() -> np.ndarray:
    rng = np.random.default_rng(20)
    parts = [
        SPECIAL,
        rng.integers(0, 2**32, SIZE // 4, dtype=np.uint32).view("float32"),
        rng.uniform(-125, 100, SIZE // 4),
        rng.normal(size=SIZE // 4),
    ]
    parts.append(rng.uniform(-10, 10, SIZE - sum(map(len, parts))))
    with np.errstate(invalid="ignore"):
        return np.concatenate([np.asarray(part, "float32") for part in parts])


@pytest.fixture(scope="module", params=NAMES)
def results(request, tmp_path_factory):
    """Results of every function on a target, by name."""
    names = [*REFERENCES, *LOOSE_REFERENCES, *ABSOLUTE_REFERENCES]
    lanes = cpu_named(request.param).lanes("float32")
    module = built({n: _function(n, lanes) for n in names}, request.param, tmp_path_factory.mktemp("kernels"))
    by_name = {}
    for name in names:
        out = poisoned([SIZE], "float32")
        module[name](runtime.tensor(_inputs()), out)
        by_name[name] = out.numpy()
    return by_name


def _check(actual: np.ndarray, expected: np.ndarray, unit: np.ndarray, limit: float) -> None:
    with np.errstate(all="ignore"):
        rounded = expected.astype("float32")
        exact = (np.isnan(actual) & np.isnan(expected)) | (np.isinf(rounded) & (actual == rounded))
        errors = np.where(exact, 0, np.abs(actual.astype("float64") - expected) / unit)
    errors[np.isnan(errors)] = np.inf
    worst = int(errors.argmax())
    assert errors[worst] <= limit, (
        f"{errors[worst]} ulp at {_inputs()[worst]!r}: {actual[worst]!r}, not {expected[worst]!r}"
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_within_units_in_the_last_place(results, name):
    reference, limit = REFERENCES[name]
    with np.errstate(all="ignore"):
        expected = reference(_inputs().astype("float64"))
        wanted_single = expected.astype("float32")
        unit = np.spacing(np.where(np.isfinite(wanted_single), np.abs(wanted_single), 1)).astype("float64")
    if name == "silu":  # the reference computes -inf * 0
        expected[_inputs() < -1e30] = -0.0
        expected[np.isneginf(_inputs())] = np.nan
    _check(results[name], expected, unit, limit)
    signed = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(results[name][signed]), np.signbit(expected[signed]))


@pytest.mark.parametrize("name", LOOSE_REFERENCES)
def test_within_units_in_the_last_place_of_the_argument(results, name):
    reference, limit = LOOSE_REFERENCES[name]
    x = _inputs()
    with np.errstate(all="ignore"):
        expected = reference(x.astype("float64"))
        unit = np.spacing(np.where(np.isfinite(x), np.abs(x), 1)).astype("float64")
    expected[x < -1e12] = 0.0
    expected[np.isneginf(x)] = np.nan
    _check(results[name], expected, unit, limit)
    assert not results[name][(x < -20) & np.isfinite(x)].any()


@pytest.mark.parametrize("name", ABSOLUTE_REFERENCES)
def test_within_an_absolute_error(results, name):
    reference, limit = ABSOLUTE_REFERENCES[name]
    with np.errstate(all="ignore"):
        expected = reference(_inputs().astype("float64"))
    _check(results[name], expected, np.full(SIZE, 2.0**-23), limit)


@pytest.mark.parametrize("target", VECTOR_NAMES)
@pytest.mark.parametrize("name", [*REFERENCES, *LOOSE_REFERENCES, *ABSOLUTE_REFERENCES])
def test_no_calls(name, target):
    text = assembly(_function(name, cpu_named(target).lanes("float32")), target)
    body = text[text.index("kernel_compute_:") :]
    body = body[: body.index(".cfi_endproc")]
    assert not re.search(CALL, body)
    assert re.search(VECTOR_INSTRUCTION[target], body)
