"""Sizes that only a call knows give onnxruntime's result or an error, in a process whose crash is a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.size_attacks import attacks

TESTS = Path(__file__).parents[1]
NAMES = [attack.name for attack in attacks()]
SAMPLE = (
    "Reshape: target 0",
    "Reshape: x[n,4] to [2, 6]",
    "Expand: x['n'], t[1]",
    "Tile: x['n'], r[1]",
    "Range: int64",
    "Split: x['n'], p[2]",
    "Pad: run-time reflect",
    "MatMul: x['n', 'a'], w['b', 2]",
    "Conv: channels",
    "TopK: x['n'], k[1]",
    "Reshape to [6 / k, -1]: chain",
)
BATCH = 25


def findings(indices, timeout):
    """Findings that a process prints while it runs these attacks, up to its end or its crash."""
    pytest.importorskip("onnxruntime")
    path = os.pathsep.join([str(TESTS), str(TESTS.parents[1] / "python"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "fuzz.run_size_attacks", *map(str, indices)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert lines and lines[-1].get("done"), f"ended with {ended.returncode} in {lines[-1:]}: {ended.stderr[-2000:]}"
    return [line for line in lines if "wrong" in line]


def test_sizes_of_a_call_give_the_reference_or_an_error():
    assert set(SAMPLE) <= set(NAMES)
    assert findings([NAMES.index(name) for name in SAMPLE], timeout=200) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(NAMES), BATCH))
def test_all_sizes_of_calls_give_the_reference_or_an_error(first):
    assert findings(range(first, min(first + BATCH, len(NAMES))), timeout=280) == []
