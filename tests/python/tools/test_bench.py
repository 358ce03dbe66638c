"""bench: every program in one table, even if one of them fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from relax_hetero.report.page import data_of
from relax_hetero.tools import bench

from .conftest import TWO, parsed

Invoke = Callable[..., Result]


def test_all_three_give_the_same_numbers(invoke: Invoke, model: Path):
    data = parsed(invoke("bench", model, *TWO, "--place", "/upper/*=llvm:1", "--rounds", 3, "--threads", 1, "--json"))
    assert (data["threads"], data["rounds"]) == (1, 3)
    rows = {row["name"]: row for row in data["engines"]}
    assert list(rows) == ["relax-hetero", "stock TVM", "ONNX Runtime"]
    for row in rows.values():
        assert row["fails"] is None and row["calls"] == 3 and 0 < row["fastest_ms"] <= row["median_ms"]
        assert row["max_abs_diff"] < 1e-5
    ratio = rows["stock TVM"]["median_ms"] / rows["ONNX Runtime"]["median_ms"]
    assert rows["stock TVM"]["times_slower_than"]["ONNX Runtime"] == pytest.approx(ratio)


def test_a_program_that_fails_is_a_row(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch):
    def fail() -> bench.Call:
        raise ValueError("no such op\n  in this model")

    monkeypatch.setattr(bench, "stock_tvm", lambda path, shapes: bench.Engine("stock TVM", fail))
    shown = invoke("bench", model, "--rounds", 1)
    assert shown.exit_code == 0
    assert "fails: ValueError: in this model" in shown.stdout and "ONNX Runtime" in shown.stdout


def test_stock_tvm_can_be_left_out(invoke: Invoke, model: Path):
    data = parsed(invoke("bench", model, "--rounds", 1, "--no-stock", "--json"))
    assert [row["name"] for row in data["engines"]] == ["relax-hetero", "ONNX Runtime"]


def test_a_trace_of_submitted_calls(invoke: Invoke, model: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    options = ["--place", "/upper/*=llvm:1", "--rounds", 1, "--no-stock", "--trace", out, "--calls", 5]
    data = parsed(invoke("bench", model, *TWO, *options, "--json"))["trace"]
    assert (data["path"], data["calls"]) == (str(out), 5) and data["calls_per_second"] > 0
    assert set(data["busy"]) == {"queue of llvm:0", "queue of llvm:1"}
    assert all(0 < share <= 1 for share in data["busy"].values())
    written = json.loads(out.read_text())
    assert written["otherData"] == {"calls": 5, "calls_left_out": 0}
    names = [event["name"] for event in written["traceEvents"] if event["ph"] == "X"]
    assert names.count("main") == 5 and names.count("llvm:0 to llvm:1") == 5
    shown = invoke("bench", model, *TWO, *options)
    assert "5 calls submitted" in shown.stdout and "queue of llvm:1" in shown.stdout and out.name in shown.stdout


def test_a_trace_never_overwrites_the_model(invoke: Invoke, model: Path):
    before = model.read_bytes()
    assert invoke("bench", model, "--trace", model).exit_code == 2
    assert model.read_bytes() == before


def test_a_library_alone_or_with_the_others(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    assert invoke("compile", model, "-o", library).exit_code == 0
    data = parsed(invoke("bench", library, "--rounds", 1, "--json"))
    assert [row["name"] for row in data["engines"]] == ["relax-hetero"]
    data = parsed(invoke("bench", library, "--onnx", model, "--rounds", 1, "--no-stock", "--json"))
    assert [row["name"] for row in data["engines"]] == ["relax-hetero", "ONNX Runtime"]
    assert data["engines"][0]["max_abs_diff"] < 1e-5
    shown = invoke("bench", library, "--rounds", 1)
    assert "--onnx" in shown.stdout


def test_a_report_has_the_calls_of_every_program(invoke: Invoke, model: Path, tmp_path: Path, monkeypatch):
    def fail() -> bench.Call:
        raise ValueError("no such op")

    monkeypatch.setattr(bench, "stock_tvm", lambda path, shapes: bench.Engine("stock TVM", fail))
    monkeypatch.setattr("relax_hetero.report.executable_report.peaks_of", lambda devices: {})
    page = tmp_path / "bench.html"
    result = invoke("bench", model, "--rounds", 3, "--threads", 1, "--html", page, "--json")
    medians = {row["name"]: row["median_ms"] for row in parsed(result)["engines"]}
    data = data_of(page.read_text())
    ours, stock, reference = data["bench"]["rows"]
    assert (ours["name"], stock["name"], reference["name"]) == ("relax-hetero", "stock TVM", "ONNX Runtime")
    assert len(ours["seconds"]) == len(reference["seconds"]) == 3
    assert sorted(ours["seconds"])[1] * 1e3 == pytest.approx(medians["relax-hetero"])
    assert (stock["seconds"], stock["fails"]) == ([], "ValueError: no such op")
    assert data["profile"]["function"] == "main" and data["bench"]["threads"] == 1


def test_a_report_never_overwrites_the_model(invoke: Invoke, model: Path):
    result = invoke("bench", model, "--html", model)
    assert result.exit_code == 2 and "is the model itself" in result.output
