"""The benchmark of queues measures what it says, on small models; traces can be drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "apps" / "bench"


@pytest.mark.slow
def test_small_models_give_all_figures():
    command = [sys.executable, BENCH / "queues.py", "pipeline", "halves", "latency"]
    options = ["--rounds", "1", "--calls", "3", "--width", "32", "--depth", "1", "--json"]
    done = subprocess.run([*command, *options], env=os.environ, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr  # whether bars are reached is not for a test
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures["pipeline"]["microseconds"]) == {"plain", "submit"}
    assert figures["pipeline"]["possible"] == 2 * 3 / 4
    assert set(figures["halves"]["speedup"]) == {"plain call", "submit"}
    microseconds = figures["latency"]["microseconds"]
    assert figures["latency"]["added"] == pytest.approx(microseconds["submit"] - microseconds["plain"])
    assert len(figures["checks"]) == 4
    for part in ("pipeline", "halves", "latency"):
        assert 0 <= figures[part]["quiet"] <= figures[part]["rounds"] <= 3


def test_a_trace_becomes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"pid": 1, "tid": 0}
    events = [
        {"name": "thread_name", "ph": "M", "args": {"name": "queue of llvm:0"}, **common},
        {"name": "stage", "cat": "step", "ph": "X", "ts": 5.0, "dur": 7.0, "args": {"call": 1}, **common},
        {"name": "bytes between steps", "ph": "C", "ts": 6.0, "args": {"llvm:0": 4096}, **common},
    ]
    (tmp_path / "out.json").write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, BENCH / "queue_bench" / "trace_picture.py", tmp_path / "out.json", tmp_path / "out.svg"]
    subprocess.run([*command, "--title", "one step"], check=True, timeout=120)
    drawn = (tmp_path / "out.svg").read_text()
    assert "one step" in drawn and "queue of llvm:0" in drawn and "stage, 1" in drawn
