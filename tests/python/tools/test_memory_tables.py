"""Memory plans, printed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_hetero.artifact.memory_plan import MemoryPlan
from relax_hetero.artifact.memory_spec import FunctionMemory, Live, StorageSpec
from relax_hetero.artifact.metadata import ConstantSpec, DeviceSpec, Metadata
from relax_hetero.artifact.signature import FunctionSignature, TensorSpec
from relax_hetero.tools.explanation import Explanation
from relax_hetero.tools.memory_tables import memory_line, print_memory, use_with

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
    print_memory(MemoryPlan(ABOUT))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "llvm:0" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("main", "llvm:0", "1.0 KiB", "4.0 KiB", "0 B", "1.0 KiB", "0 B", "3.0 KiB", "1.333")
    ]


def test_sizes_that_only_a_call_gives(capsys: pytest.CaptureFixture[str]):
    print_memory(MemoryPlan(SYMBOLIC))
    assert capsys.readouterr().out == "Memory of main depends on n.\n"
    use = use_with(MemoryPlan(SYMBOLIC), SIGNATURE, {"x": np.zeros((3, 4), "float32")})
    assert use is not None and use.transient == 3072
    assert memory_line(use) == "Memory: weights 1.0 KiB, transient 3.0 KiB a call."
    unknown = replace(SYMBOLIC, memory=(FunctionMemory("main", (StorageSpec(0, "m", 0, 0, "value", "a"),), ()),))
    assert use_with(MemoryPlan(unknown), SIGNATURE, {"x": np.zeros((3, 4), "float32")}) is None


def test_one_line_of_totals():
    line = memory_line(MemoryPlan(ABOUT).at("main"))
    assert line == "Memory: weights 1.0 KiB, transient 4.0 KiB a call, 1.333 times the least."


def test_an_explanation_holds_it():
    data = Explanation("m", {"llvm:0": "{}"}, [], memory=MemoryPlan(ABOUT)).to_json()["memory"]
    assert data[0]["devices"][0]["transient"] == 4096
    (symbolic,) = Explanation("m", {"llvm:0": "{}"}, [], memory=MemoryPlan(SYMBOLIC)).to_json()["memory"]
    assert symbolic == {"function": "main", "depends_on": ["n"]}
