"""Which kernel computes what and in which precision, printed."""

from __future__ import annotations

from typing import Any

import pytest

from relax_hetero.tools.fusion_tables import precisions_text, print_fusions, product_precisions


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
    "declined": [],
}


def test_products_are_counted_by_precision():
    assert product_precisions(FUSIONS) == {"u8*s8->s32": 2, "bf16": 1, "f32": 1, "int4*f32": 1}
    assert precisions_text(product_precisions(FUSIONS)).startswith("Products: 2 in u8*s8->s32, 1 in bf16,")
    assert precisions_text({}) == "Products: none."


def test_every_dispatch_is_printed_with_its_precision(capsys: pytest.CaptureFixture[str]):
    print_fusions(FUSIONS, every_op=True)
    shown = capsys.readouterr().out
    assert all(entry["precision"] in shown for entry in FUSIONS["dispatches"])
    print_fusions(FUSIONS, every_op=False)
    shown = capsys.readouterr().out
    assert "Products: 2 in u8*s8->s32" in shown and "f32, s64" not in shown


def test_libraries_without_precisions_are_printed(capsys: pytest.CaptureFixture[str]):
    old = {key: value for key, value in dispatch("a", "", "matmul").items() if key != "precision"}
    print_fusions({"dispatches": [old], "declined": []}, every_op=True)
    assert "Products: 1 in what is not known." in capsys.readouterr().out
