"""The benchmark of transfers: every ordered pair of this machine's devices."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "apps" / "bench"


def run(*arguments):
    command = [sys.executable, str(BENCH / "transfers.py"), "--megabytes", "1", "--rounds", "3", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_ordered_pair():
    rows = json.loads(run("--vdevice", "llvm", "--vdevice", "llvm", "--json"))
    assert [(row["from"], row["to"]) for row in rows] == [("llvm:0", "llvm:1"), ("llvm:1", "llvm:0")]
    for row in rows:
        assert row["GB/s"] > 0 and row["latency_us"] > 0
        assert abs(row["GB/s"] * row["milliseconds"] - 1) < 1e-6  # a megabyte
