"""A few attacks of each kind, and the harness itself: it sees crashes, hangs and foreign errors."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from . import harness
from .attacks import KINDS, kind_of
from .harness import Outcome, Report

CASES = {"graphs": 1, "sizes": 2, "arguments": 20, "models": 20, "containers": 20}
CASES |= {"gguf": 5, "forms": 20}
"""A few seconds of each quick kind. A number and not a time, so that a busy machine tries the same ones."""


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.quick])
def test_nothing_is_found(kind: str) -> None:
    report = Report()
    first = int(os.environ["RELAX_HETERO_TEST_SEED"]) * 1_000_003
    end = time.monotonic() + 2 * harness.SILENCE_S
    harness._run_child(kind, first, end, report, kind_of(kind).environment(), CASES[kind])
    assert report.total > 0
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (0, "right"),
        (1, "refused"),
        (2, "wrong"),
        (3, "foreign"),
        (4, "crash -11"),
        pytest.param(5, "hang", marks=pytest.mark.slow),
    ],
)
def test_the_harness_reports_outcomes(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SILENCE_S", 8.0)
    report = Report()
    end = time.monotonic() + 60
    following = harness._run_child("known", seed, end, report, kind_of("known").environment(), 1)
    assert following == seed + 1
    assert dict(report.tried) == {f"known {kind}": 1}
    assert [found[1] for found in report.findings] == ([] if kind in harness.HARMLESS else [seed])


def test_a_batch_is_counted_case_by_case_and_ends_like_its_first_finding() -> None:
    outcomes = [harness.RIGHT, Outcome("wrong", "first"), harness.REFUSED, Outcome("foreign", "second")]
    outcome = harness.worst(outcomes)
    assert (outcome.kind, outcome.detail) == ("wrong", "first")
    assert outcome.counts == {"right": 1, "wrong": 1, "refused": 1, "foreign": 1}


def test_an_error_that_the_attack_lets_through_is_a_finding() -> None:
    def attack(_: np.random.Generator) -> Outcome:
        raise KeyError("x")

    outcome = harness.tried(attack, 0)
    assert outcome.kind == "foreign"
    assert "KeyError: 'x'" in outcome.detail
