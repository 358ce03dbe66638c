"""A report of encodings, added up per device and printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_hetero.tools.encoding_tables import encoding_totals, print_encodings
from relax_hetero.tools.explanation import Explanation
from relax_hetero.transform.ir.reports import (
    CancelledEntry,
    EncodedOpEntry,
    EncodedTransferEntry,
    EncodingReport,
    OperandEntry,
)

TILED = "pack<outer=[1, 0] inner=[1:48]>"
LHS = OperandEntry("lhs", "a", "mx40", "float32", "matmul[0]<..>", "identity<2>", "m * 160", "m * 160", "never")
RHS = OperandEntry("rhs", "w", "40x64", "float32", "matmul[1]<..>", TILED, 10240, 15360, "at compile time")
INNER = OperandEntry("rhs", "v", "mx64", "float32", "matmul[1]<..>", TILED, "m * 256", "m * 384", "at run time")
OUT = replace(LHS, role="result", variable="y")
PRODUCT = EncodedOpEntry("main", "y", "matmul", "llvm:0", "matmul_0", (LHS, RHS, OUT), "relu(x0)")
REPORT = EncodingReport(
    [PRODUCT, replace(PRODUCT, variable="z"), replace(PRODUCT, variable="q", kernel="matmul_1", operands=(LHS, INNER))],
    [EncodedTransferEntry("main", "moved", "llvm:0", "c:0", TILED, 15360, "on c:0: a to b")],
    [CancelledEntry("main", "p", "matmul", "cuda:0", "no resolver of [cuda]")],
).to_data()


def test_a_tensor_that_two_ops_read_counts_once():
    gpu, cpu = encoding_totals(REPORT)
    assert (cpu.device, cpu.ops, cpu.kernels, cpu.packed, cpu.unknown_sizes) == ("llvm:0", 3, 2, 2, 1)
    assert (cpu.bytes_before, cpu.bytes_after, cpu.cancelled) == (10240, 15360, 0)
    assert (gpu.device, gpu.ops, gpu.packed, gpu.cancelled) == ("cuda:0", 0, 0, 1)


def test_everything_is_printed(capsys: pytest.CaptureFixture[str]):
    print_encodings(REPORT, every_op=True)
    shown = capsys.readouterr().out
    for text in ("no resolver of [cuda]", "on c:0: a to b", "relu(x0)", "10.0 KiB", "15.0 KiB", "m * 384", TILED):
        assert text in shown
    assert "3 encoded ops, 1 encoded transfer, 1 cancelled." in shown


def test_summary_leaves_layouts_of_ops_out(capsys: pytest.CaptureFixture[str]):
    print_encodings(REPORT, every_op=False)
    shown = capsys.readouterr().out
    assert "no resolver of [cuda]" in shown and "relu(x0)" not in shown


def test_explain_carries_it():
    data = Explanation("m", {}, [], REPORT).to_json()["encodings"]
    assert [device["device"] for device in data["devices"]] == ["cuda:0", "llvm:0"]
    assert data["ops"] == REPORT["ops"] and data["cancelled"] == REPORT["cancelled"]
    assert Explanation("m", {}, []).to_json()["encodings"] is None
