"""The benchmark of transfers: every ordered pair of this machine's devices."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relax_hetero as rh

BENCH = Path(__file__).parents[3] / "apps" / "bench"


def run(*arguments):
    command = [sys.executable, str(BENCH / "transfers.py"), "--megabytes", "1", "--rounds", "3", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transfers_in_order_have_the_time_of_a_longer_chain(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import transfers

    times = iter([3.0, 3.0 + 32 * 0.25])
    monkeypatch.setattr(transfers, "seconds_per_call", lambda *_: next(times))
    vdevices = transfers.parse_vdevices(["llvm", "llvm"])
    assert transfers.seconds_in_order(vdevices, 0, 1, 1, 64) == pytest.approx(0.25)
    chain = transfers.crossing_module(vdevices, 0, 1, 3, 64)
    x = np.eye(64, dtype="float32")
    result = rh.vm.VirtualMachine(rh.compile(chain))["main"](x)
    assert result.device.index == 1 and np.array_equal(result.numpy(), np.ones(64, "float32"))


def test_every_ordered_pair():
    rows = json.loads(run("--vdevice", "llvm", "--vdevice", "llvm", "--json"))
    assert [(row["from"], row["to"]) for row in rows] == [("llvm:0", "llvm:1"), ("llvm:1", "llvm:0")]
    for row in rows:
        assert row["GB/s"] > 0 and row["latency_us"] > 0
        assert abs(row["GB/s"] * row["milliseconds"] - 1) < 1e-6  # a megabyte
