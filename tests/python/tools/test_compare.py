"""Comparing outputs with the reference, and timing in rounds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from relax_hetero.display.console import print_json
from relax_hetero.display.text import bytes_text
from relax_hetero.tools.bench import MIN_CALLS, interleave
from relax_hetero.tools.onnxruntime_reference import compare


def test_within_tolerance():
    expected = np.array([1.0, 100.0], "float32")
    result = compare("y", expected + np.array([0, 0.05], "float32"), expected, rtol=1e-3, atol=0)
    assert result.passed and result.max_abs == pytest.approx(0.05, rel=1e-3)


def test_outside_tolerance_counts_elements():
    expected = np.ones(4, "float32")
    result = compare("y", np.array([1, 1.1, 1, 2], "float32"), expected, rtol=1e-3, atol=1e-3)
    assert not result.passed and (result.wrong, result.total) == (2, 4)


def test_nan_and_infinity_equal_themselves_only():
    special = np.array([np.nan, np.inf, -np.inf], "float32")
    assert compare("y", special, special, 1e-3, 0).passed
    assert compare("y", special, np.array([1, np.inf, np.inf], "float32"), 1e-3, 0).wrong == 2


@pytest.mark.parametrize("actual", [np.ones((1, 2), "float32"), np.ones(2, "float64")])
def test_shape_and_element_type_must_agree(actual: np.ndarray):
    result = compare("y", actual, np.ones(2, "float32"), 1e-3, 0)
    assert not result.passed and "expected float32[2]" in result.problem


def test_booleans_integers_and_empty_arrays():
    assert compare("y", np.array([True]), np.array([True]), 0, 0).passed
    assert compare("y", np.array([1, 2]), np.array([1, 3]), 0, 0).wrong == 1
    assert compare("y", np.zeros((0, 2)), np.zeros((0, 2)), 0, 0).passed


def test_rounds_are_interleaved_and_each_timed_call_follows_a_warm_one():
    order: list[str] = []
    turns: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timings = interleave(calls, rounds=3, budget=60, advance=turns.append)
    assert order == ["a", "a", "b", "b"] * 3
    assert turns == ["a", "b"] * 3
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_a_slow_program_sits_out_after_its_budget():
    timings = interleave({"slow": lambda: None, "other": lambda: None}, rounds=9, budget=0)
    assert len(timings["slow"].seconds) == MIN_CALLS


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    print_json({"a": float("nan"), "b": [1.5, float("inf")], "c": ("x", None)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": ["x", None]}


def test_bytes_text():
    assert [bytes_text(n) for n in (None, 0, 1023, 1024, 3 << 20, 5 << 30)] == [
        "?",
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
