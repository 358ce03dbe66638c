"""Causal triangles are removed from scores, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from relax_hetero.encoding.expression import Expression
from relax_hetero.transform.fuse.attention_patterns import without_triangle

LOWEST = float(np.finfo("float32").min)


def triangle(m: int, n: int, ahead: int | None = None) -> np.ndarray:
    return np.tril(np.ones((m, n), bool), n - m if ahead is None else ahead)[None, None]


def added(visible: np.ndarray, hidden: float = LOWEST) -> np.ndarray:
    return np.where(visible, np.float32(0), np.float32(hidden))


def stripped(scores: str, *masks: Any, m: int = 5, n: int = 7) -> tuple[str, int, str]:
    operands = [relax.const(mask) if isinstance(mask, np.ndarray) else mask for mask in masks]
    expression, rest, causal = without_triangle(Expression.parse(scores), operands, m, n)
    return str(expression), len(rest), causal


OTHER = relax.Var("mask", relax.TensorType((1, 1, 1, 7), "float32"))


@pytest.mark.parametrize(
    ("scores", "masks", "expected"),
    [
        (f"where(x1, multiply(x0, 0.5), {LOWEST})", [triangle(5, 7)], ("multiply(x0, 0.5)", 0)),
        ("where(x1, x0, -inf)", [triangle(5, 7)], ("x0", 0)),
        ("add(x0, x1)", [added(triangle(5, 7))], ("x0", 0)),
        ("add(x1, x0)", [added(triangle(5, 7), -np.inf)], ("x0", 0)),
        (f"add(where(x1, x0, {LOWEST}), x2)", [triangle(5, 7), OTHER], ("add(x0, x1)", 1)),
        (f"add(where(x2, x0, {LOWEST}), x1)", [OTHER, triangle(5, 7)], ("add(x0, x1)", 1)),
        ("add(add(x0, x1), x2)", [OTHER, added(triangle(5, 7))], ("add(x0, x1)", 1)),
    ],
)
def test_triangles(scores: str, masks: list[Any], expected: tuple[str, int]) -> None:
    assert stripped(scores, *masks) == (*expected, "bottom_right")


@pytest.mark.parametrize(
    ("scores", "masks"),
    [
        ("where(x1, x0, -10000.0)", [triangle(5, 7)]),  # a row of lower scores would not be hidden
        ("where(x1, 0.0, x0)", [triangle(5, 7)]),
        ("where(x1, x0, -inf)", [triangle(5, 7, 0)]),
        ("where(x1, x0, -inf)", [~triangle(5, 7)]),
        ("where(x1, x0, -inf)", [relax.Var("x", relax.TensorType((1, 1, 5, 7), "bool"))]),
        ("multiply(x0, x1)", [added(triangle(5, 7))]),
        ("add(multiply(x0, x1), x1)", [added(triangle(5, 7))]),
        ("add(x0, x1)", [added(triangle(5, 7), -10000.0)]),
        ("add(x0, x1)", [added(triangle(5, 7)) + np.float32(1)]),
    ],
)
def test_masks_that_are_not_triangles(scores: str, masks: list[Any]) -> None:
    assert stripped(scores, *masks) == (str(Expression.parse(scores)), 1, "")


def test_masks_that_hide_nothing() -> None:
    zeros = np.zeros((1, 1, 5, 7), "float32")
    assert stripped("add(x0, x1)", zeros) == ("x0", 0, "")
    assert stripped("where(x1, x0, -inf)", zeros == 0) == ("x0", 0, "")
    assert stripped("add(where(x1, x0, -inf), x2)", zeros == 0, added(triangle(5, 7))) == ("x0", 0, "bottom_right")
