"""Kernels as tables: layouts of encoded ops, added up per device, and the ops that each kernel computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_hetero.display.console import show
from relax_hetero.report.text.explanation import Explanation
from relax_hetero.report.text.kernel_tables import (
    encoding_tables,
    encoding_totals,
    fusion_tables,
    fusions_line,
    precisions_text,
    product_precisions,
)
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
    show(encoding_tables(REPORT))
    shown = capsys.readouterr().out
    for text in ("no resolver of [cuda]", "on c:0: a to b", "relu(x0)", "10.0 KiB", "15.0 KiB", "m * 384", TILED):
        assert text in shown
    assert "3 encoded ops, 1 encoded transfer, 1 cancelled." in shown


def test_an_overview_leaves_layouts_of_ops_out(capsys: pytest.CaptureFixture[str]):
    show(Explanation("m", {}, [], REPORT).tables())
    shown = capsys.readouterr().out
    assert "no resolver of [cuda]" in shown and "relu(x0)" not in shown


def test_explain_carries_it():
    data = Explanation("m", {}, [], REPORT).to_json()["encodings"]
    assert [device["device"] for device in data["devices"]] == ["cuda:0", "llvm:0"]
    assert data["ops"] == REPORT["ops"] and data["cancelled"] == REPORT["cancelled"]
    assert Explanation("m", {}, []).to_json()["encodings"] is None


def dispatch(kernel: str, precision: str, *ops: str) -> dict[str, Any]:
    return {"variable": f"{kernel}_result", "kernel": kernel, "device": "llvm:0", "ops": ops, "precision": precision}


FUSIONS = {
    "dispatches": [
        dispatch("a", "u8*s8->s32", "matmul", "add"),
        dispatch("b", "bf16", "conv2d"),
        dispatch("c", "u8*s8->s32", "batch_matmul"),
        dispatch("d", "f32", "attention"),
        dispatch("e", "int4*f32", "block_matmul"),
        dispatch("f", "f32, s64", "take", "relu"),
    ],
    "missed": [],
}


def test_products_are_counted_by_precision():
    assert product_precisions(FUSIONS) == {"u8*s8->s32": 2, "bf16": 1, "f32": 1, "int4*f32": 1}
    assert precisions_text(product_precisions(FUSIONS)).startswith("Products: 2 in u8*s8->s32, 1 in bf16,")
    assert precisions_text({}) == "Products: none."


def test_every_dispatch_is_printed_with_its_precision(capsys: pytest.CaptureFixture[str]):
    show(fusion_tables(FUSIONS))
    shown = capsys.readouterr().out
    assert all(entry["precision"] in shown for entry in FUSIONS["dispatches"])
    shown = fusions_line(FUSIONS)
    assert "Products: 2 in u8*s8->s32" in shown and "f32, s64" not in shown


def test_libraries_without_precisions_are_printed(capsys: pytest.CaptureFixture[str]):
    old = {key: value for key, value in dispatch("a", "", "matmul").items() if key != "precision"}
    show(fusion_tables({"dispatches": [old], "missed": []}))
    assert "Products: 1 in unknown precision." in capsys.readouterr().out
