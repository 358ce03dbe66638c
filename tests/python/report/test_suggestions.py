"""Suggestions of changes, from a profile."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import relax_hetero as rh
from relax_hetero.report.executable_report import suggestions
from relax_hetero.vm.profile import TO_DEVICE, VM_OVERHEAD
from report.toy_model import Model

PEAKS = {"llvm:0": {"operations_per_second": {"f32": 1e11, "bf16": 3e11}, "bytes_per_second": 1e10}}


def row(symbol: str, share: float, reached: float | None = None, bound: str | None = None) -> dict[str, Any]:
    about = {"symbol": symbol, "device": "llvm:0", "precision": "f32"}
    return {**about, "share": share, "share_of_peak": reached, "bound": bound}


@pytest.fixture(scope="module")
def about():
    """Metadata of a model of one device whose kernels are all in command buffers."""
    return replace(rh.compile(Model, cache=False).metadata, schedules=(), single_calls=())


def test_without_a_profile_it_says_how_to_get_one(about):
    (text,) = suggestions(about, (), {})
    assert "--profile" in text


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            row("k", 0.5, 0.9, "arithmetic"),
            "50 % of a call is arithmetic in f32 on llvm:0, .* 3.0 times as fast in bf16",
        ),
        (row("k", 0.5, 0.9, "memory"), "The memory of llvm:0 bounds kernels that take 50 % of a call"),
        (row("k", 0.5, 0.1, "memory"), "k takes 50 % of a call, and reaches 10 % of the memory peak of llvm:0"),
        (row(TO_DEVICE, 0.06), "Transfers take 6 % of a call"),
        (row(VM_OVERHEAD, 0.06), "6 % of a call is spent around kernels"),
    ],
)
def test_expensive_kernels_get_a_suggestion(about, profile, expected):
    (text,) = suggestions(about, [profile], PEAKS)
    assert re.match(expected, text)
    (nothing,) = suggestions(about, [profile | {"share": 0.01}], PEAKS)
    assert nothing.startswith("Nothing stands out")


def test_the_largest_comes_first_and_devices_that_never_overlap_last():
    about = rh.compile(Model, cache=False).metadata
    texts = suggestions(about, [row(TO_DEVICE, 0.1), row("k", 0.5, 0.9, "memory")], PEAKS)
    assert [text.split()[0] for text in texts] == ["The", "Transfers", "llvm:0"]
    assert "never work at the same time in a call of main" in texts[-1]
