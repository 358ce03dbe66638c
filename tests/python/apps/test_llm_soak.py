"""The soak of a language model's server, for two seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")
SOAK = Path(__file__).resolve().parents[3] / "apps" / "bench" / "llm_bench" / "soak.py"


@pytest.mark.slow
def test_nothing_is_lost():
    ran = subprocess.run([sys.executable, str(SOAK), "--smoke"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lost: 0" in ran.stdout
