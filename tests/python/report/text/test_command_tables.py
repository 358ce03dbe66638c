"""Command buffers as tables and JSON: sizes, references, and what stayed outside."""

from __future__ import annotations

import pytest

from relax_hetero.artifact.commands import (
    Barrier,
    Copy,
    Dispatch,
    Fill,
    KernelSpec,
    Reference,
    RegionSpec,
    ScalarParam,
    SingleCall,
    SlotSpec,
    TensorParam,
)
from relax_hetero.display.console import show
from relax_hetero.report.text.command_tables import CommandBuffers
from relax_hetero.report.text.explanation import Explanation

SCALE = KernelSpec(
    "scale",
    1,
    (
        TensorParam("A", "float32", ("n",), 4, "read"),
        TensorParam("W", "float32", (64,), 4, "read"),
        TensorParam("B", "float32", ("n",), 4, "write"),
    ),
    (ScalarParam("n", "int64"),),
)
SLOT, WEIGHT, ARENA = Reference("slot", 0, 0, 1024), Reference("direct", 0, 0, 256), Reference("arena", 0, 128, 1024)
OUT = Reference("slot", 1, "(4 * n)", "(4 * n)")
REGION = RegionSpec(
    "main_commands",
    "main",
    1,
    (
        SlotSpec("x", 1, 1024, 16, "read", "float32", (256,)),
        SlotSpec("y", 1, "(8 * n)", 64, "write", "float32", ("n",)),
    ),
    ("n",),
    (7, 9),
    2048,
    (
        Dispatch("scale", (SLOT, WEIGHT, ARENA), ("n",), variable="[lv]"),
        Fill(ARENA, "00ff"),
        Barrier(),
        Dispatch("scale", (ARENA, Reference("direct", 1, 0, 64), OUT), (256,), count=Reference("slot", 0, 12, 4)),
        Copy(ARENA, OUT),
    ),
    ended_by="transfer (moved)",
)
BUFFERS = CommandBuffers(["llvm:0", "c:0"], [REGION], {"scale": SCALE}, [SingleCall("main", "z", "add", "alone")])


def rows_with(text: str, first: str) -> list[list[str]]:
    """The cells of the printed rows whose first cell is `first`."""
    rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line)
    return [row for row in rows if row[0] == first]


def test_regions_are_printed_with_their_slots_and_commands(capsys: pytest.CaptureFixture[str]):
    show(BUFFERS.tables())
    shown = capsys.readouterr().out
    (region,) = rows_with(shown, "main_commands")
    assert region[1:] == ["c:0", "host function", "2", "1", "1", "2", "n", "2 (320 B)", "2.0 KiB", "transfer (moved)"]
    slot, first = rows_with(shown, "0")
    assert slot == ["0", "x", "read", "1.0 KiB", "16", "float32[256]", "c:0"]
    assert first == ["0", "scale", "slot 0, direct 0", "arena +128", "n", "[lv]"]
    slot, fill = rows_with(shown, "1")
    assert slot == ["1", "y", "write", "(8 * n)", "64", "float32[n]", "c:0"]
    assert fill == ["1", "fill", "", "arena +128", "00ff", ""]
    assert rows_with(shown, "2") == [["2", "barrier", "", "", "", ""]]
    (indirect,) = rows_with(shown, "3")
    assert indirect[2:4] == ["arena +128, direct 1, count slot 0 +12", "slot 1 +(4 * n)"]
    assert rows_with(shown, "4") == [["4", "copy", "arena +128", "slot 1 +(4 * n)", "", ""]]
    assert rows_with(shown, "z") == [["z", "add", "main", "alone"]]
    assert "1 command buffer of 2 kernel calls in all, 1 kernel call outside." in shown


def test_an_overview_leaves_slots_and_commands_out(capsys: pytest.CaptureFixture[str]):
    show(Explanation("m", {}, [], commands=BUFFERS).tables())
    shown = capsys.readouterr().out
    assert BUFFERS.line() in shown and not rows_with(shown, "0") and not rows_with(shown, "z")


def test_json_has_names_and_sizes():
    data = Explanation("m", {"llvm:0": "{}"}, [], commands=BUFFERS).to_json()["command_buffers"]
    (region,) = data["regions"]
    assert (region["device"], region["constant_bytes"]) == ("c:0", 320)
    assert region["counts"] == {"kernels": 2, "copies": 1, "fills": 1}
    assert [slot["name"] for slot in region["slots"]] == ["x", "y"]
    assert region["commands"][0]["operands"][2] == ["arena", 0, 128, 1024]
    assert [kernel["name"] for kernel in data["kernels"]] == ["scale"]
    assert data["single_calls"] == [{"function": "main", "variable": "z", "kernel": "add", "why": "alone"}]
    assert Explanation("m", {}, []).to_json()["command_buffers"] is None
