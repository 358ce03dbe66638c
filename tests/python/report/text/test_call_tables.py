"""Calls as tables: the memory that they take, and the steps they go through."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from relax_hetero.artifact.memory_plan import MemoryPlan
from relax_hetero.artifact.memory_spec import FunctionMemory, Live, StorageSpec
from relax_hetero.artifact.metadata import ConstantSpec, DeviceSpec, Metadata
from relax_hetero.artifact.schedule import Schedule, Step
from relax_hetero.artifact.signature import FunctionSignature, TensorSpec
from relax_hetero.artifact.typed_data import from_data
from relax_hetero.display.console import show
from relax_hetero.report.text.call_tables import Schedules, memory_line, memory_lines, memory_tables, use_with
from relax_hetero.report.text.explanation import Explanation

STORAGES = (StorageSpec(0, 3072, 0, 1, "value", "a"), StorageSpec(0, 1024, 0, 0, "transfer", "b"))
TENSORS = (Live(0, 2048, 0, 1), Live(1, 1024, 0, 0))
MAIN = FunctionMemory("main", STORAGES, TENSORS)
SIGNATURE = FunctionSignature("main", (TensorSpec("x", ("n", 4), "float32", 0),), ())
ABOUT = Metadata(
    devices=(DeviceSpec('{"kind": "llvm"}'),),
    host_index=0,
    signatures={"main": SIGNATURE},
    constants=(ConstantSpec("w", (256,), "float32", 0),),
    memory=(MAIN,),
)
SYMBOLIC = replace(ABOUT, memory=(FunctionMemory("main", (StorageSpec(0, "n*1024", 0, 0, "value", "a"),), ()),))


def test_bytes_of_each_device_are_printed(capsys: pytest.CaptureFixture[str]):
    show(memory_tables(MemoryPlan(ABOUT)))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "llvm:0" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("main", "llvm:0", "1.0 KiB", "4.0 KiB", "0 B", "1.0 KiB", "0 B", "3.0 KiB", "1.333")
    ]


def test_sizes_that_only_a_call_gives(capsys: pytest.CaptureFixture[str]):
    show(memory_tables(MemoryPlan(SYMBOLIC)))
    assert capsys.readouterr().out == "Memory of main depends on n.\n"
    use = use_with(MemoryPlan(SYMBOLIC), SIGNATURE, {"x": np.zeros((3, 4), "float32")})
    assert use is not None and use.transient == 3072
    assert memory_line(use) == "Memory: weights 1.0 KiB, transient 3.0 KiB per call."
    unknown = replace(SYMBOLIC, memory=(FunctionMemory("main", (StorageSpec(0, "m", 0, 0, "value", "a"),), ()),))
    assert use_with(MemoryPlan(unknown), SIGNATURE, {"x": np.zeros((3, 4), "float32")}) is None


def test_one_line_of_totals():
    line = memory_line(MemoryPlan(ABOUT).at("main"))
    assert line == "Memory: weights 1.0 KiB, transient 4.0 KiB per call, 1.333 times the lower bound."


def test_a_line_for_each_function_where_there_are_several():
    both = {name: replace(SIGNATURE, name=name) for name in ("main", "other")}
    other = replace(ABOUT, signatures=both, memory=(MAIN, replace(SYMBOLIC.memory[0], name="other")))
    assert memory_lines(MemoryPlan(ABOUT)) == [memory_line(MemoryPlan(ABOUT).at("main"))]
    first, second = memory_lines(MemoryPlan(other))
    assert first.startswith("main: Memory: weights") and second == "Memory of other depends on n."


def test_an_explanation_holds_it():
    data = Explanation("m", {"llvm:0": "{}"}, [], memory=MemoryPlan(ABOUT)).to_json()["memory"]
    assert data[0]["devices"][0]["transient"] == 4096
    (symbolic,) = Explanation("m", {"llvm:0": "{}"}, [], memory=MemoryPlan(SYMBOLIC)).to_json()["memory"]
    assert symbolic == {"function": "main", "depends_on": ["n"]}


SCHEDULE = Schedule(
    "main",
    1,
    5,
    (
        Step(0, (0,), (1,), "main_step", calls=("main_commands",)),
        Step(1, (1,), (2,), source=0),
        Step(1, (2,), (3,), "main_step_1", other_devices=(-1,)),
        Step(0, (1,), (4,), "main_step_2", calls=("exp", "tanh")),
    ),
    (3, 4),
)
ALONE = Schedule("other", 1, 2, (Step(1, (0,), (1,), "other"),), 1)


def test_a_row_for_each_step_of_functions_that_have_several(capsys):
    show(Schedules(["llvm:0", "c:0"], [SCHEDULE, ALONE]).tables())
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    assert rows == [
        ["0", "llvm:0", "main_commands", "-"],
        ["1", "c:0", "transfer from llvm:0", "0"],
        ["2", "c:0, host", "main_step_1", "1"],
        ["3", "llvm:0", "exp, tanh", "0"],
    ]
    assert "3 steps of work and 1 transfer; within one call some can overlap." in text
    assert "other" not in text


def test_json_is_the_steps():
    first, second = json.loads(json.dumps(Schedules(["llvm:0", "c:0"], [SCHEDULE, ALONE]).to_json()))
    assert first.pop("overlaps") is True and second.pop("overlaps") is False
    assert from_data(list[Schedule], [first, second]) == [SCHEDULE, ALONE]
