"""The benchmark of updates in place, on a small cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "apps" / "bench"


@pytest.mark.slow
def test_every_update():
    command = [sys.executable, str(BENCH / "in_place.py"), "--rows", "4", "--seconds", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["update"] for row in rows] == ["scatter_nd", "scatter_elements", "add"]
    assert all(row["donated in place"] and not row["kept in place"] for row in rows)
