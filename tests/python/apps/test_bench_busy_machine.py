"""apps/bench/busy_machine.py measures its small product, alone and alongside a busy process."""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "apps" / "bench"


def test_a_row_for_the_idle_and_for_the_busy_machine(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    import busy_machine

    busy_machine.main(["--threads", "2", "--busy", "1", "--seconds", "0.1", "--turns", "2"])
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[" product ", " 0 "], [" product ", " 1 "]]
