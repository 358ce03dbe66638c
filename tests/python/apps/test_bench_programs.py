"""Benchmarks of programs and of torch.compile: results that are wrong, or not numbers, are failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

BENCH = Path(__file__).parents[3] / "apps" / "bench"
BAD = [float("nan"), float("inf"), 0.5]


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [0.01, *BAD])
def test_programs_with_wrong_results_are_failures(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime_programs

    row = {"program": "onnx", "error": error, "speed": 1.0}
    monkeypatch.setattr(onnxruntime_programs, "measure", lambda name, rounds: row)
    done = CliRunner().invoke(onnxruntime_programs.main, ["onnx"])
    assert (done.exit_code, "failed: onnx" in done.output) == ((1, True) if error in BAD else (0, False))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", BAD)
def test_networks_with_wrong_results_are_failures(error: float) -> None:
    from torch_compile_models import wrong_networks

    rows = [{"network": "a", "relax_hetero, error": 1e-5}, {"network": "b", "relax_hetero, error": error}]
    assert wrong_networks(rows) == ["b"]
