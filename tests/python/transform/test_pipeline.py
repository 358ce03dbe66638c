"""The list of passes: its users, its steps, and the table in the documents."""

import re
from pathlib import Path

import pytest
from tvm.ir import assert_structural_equal

import relax_hetero as rh
from models.attention_graphs import bert
from relax_hetero.transform.pipeline import pipeline_steps, pipeline_table

DESIGN = Path(__file__).parents[3] / "docs" / "design.md"
TWO = [rh.VDevice("llvm"), rh.VDevice("c")]


def test_a_stage_is_the_package_of_its_pass():
    for step in pipeline_steps():
        module = rh.transform.find_pass(step.name).constructor.__module__.removeprefix("relax_hetero.transform.")
        assert module.startswith(f"{step.stage}.") or "." not in module


def test_stock_tvm_gets_the_list_without_steps_of_our_linker():
    ours = [step.name for step in pipeline_steps()]
    stock = [each.info.name for each in rh.get_pipeline().passes]
    assert [name for name in ours if name not in stock] == ["FormMailboxes", "FormCudaGraphs", "FormSchedules"]
    assert stock == [name for name in ours if name in stock]
    assert [each.info.name for each in rh.get_pipeline(command_buffers=False).passes] == [
        name for name in stock if name != "FormCommandBuffers"
    ]


def test_compile_runs_the_list():
    done = []
    rh.compile(rh.from_onnx(bert(), TWO), progress=lambda *step: done.append(step), cache=False)
    count = len(pipeline_steps())
    assert [step for step in done if step[0] == "passes"] == [("passes", n + 1, count) for n in range(count)]


def test_the_documents_show_the_list():
    (shown,) = re.findall(r"<!-- pipeline -->\n(.*?)\n<!-- /pipeline -->", DESIGN.read_text(), re.DOTALL)
    assert shown == pipeline_table(), "write relax_hetero.transform.pipeline.pipeline_table() between the marks"


@pytest.mark.parametrize("devices", [TWO[:1], TWO])
def test_a_second_run_of_a_step_changes_nothing(devices):
    mod = rh.from_onnx(bert(), devices, placement={"*MatMul*": devices[-1]})
    for step in pipeline_steps():
        mod = step.run(mod)
        assert_structural_equal(step.run(mod), mod)
