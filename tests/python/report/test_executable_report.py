"""Reports of executables: the graph with its kernels, devices, tables, and what was measured."""

import json
from collections import Counter

import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.report.executable_report import layouts_of, report_of
from relax_hetero.report.page import data_of
from report.toy_model import ARGUMENTS, Model


@pytest.fixture(scope="module")
def executable():
    return rh.compile(Model, cache=False)


@pytest.fixture(scope="module")
def measured(executable):
    machine = rh.vm.VirtualMachine(executable)
    profile = machine.profile("main", *ARGUMENTS)
    with machine.trace(limit=2) as trace:
        for _ in range(2):
            machine.submit("main", *ARGUMENTS)
    return report_of(executable, profile=profile, trace=trace, title="toy")


def named(data):
    return {node["name"]: node for node in data["nodes"]}


def test_nodes_and_edges_are_those_of_the_model(executable):
    data = report_of(executable)
    nodes = named(data)
    assert [node["id"] for node in data["nodes"]] == list(range(len(data["nodes"])))
    assert Counter(node["kind"] for node in data["nodes"]) == {"input": 3, "op": 4, "transfer": 1, "output": 1}
    assert nodes["s"]["op"] == "relax.nn.softmax"
    assert nodes["s"]["values"] == [{"shape": ["n", 8], "dtype": "float32", "bytes": None, "layout": None}]
    assert nodes["w"]["values"][0]["bytes"] == 512
    assert nodes["s"]["reason"].startswith("follows")
    transfer = nodes["lv1"]["id"]
    assert [(e["value"], e["transfer"]) for e in data["edges"] if transfer in (e["from"], e["to"])] == [
        ("y", True),
        ("lv1", True),
    ]
    (function,) = data["functions"]
    assert [data["nodes"][number]["name"] for number in function["inputs"]] == ["x", "w", "b"]
    assert len(function["outputs"]) == 1


def test_kernels_are_groups_of_the_ops_that_they_compute(executable):
    data = report_of(executable)
    ops = {
        group["kernel"].split("_")[0]: [data["nodes"][node]["name"] for node in group["nodes"]]
        for group in data["groups"]
    }
    assert ops == {"tir": ["y"], "pack": [], "matmul": ["lv2", "z", "s"]}
    for group in data["groups"]:
        assert all(data["nodes"][node]["group"] == group["id"] for node in group["nodes"])
        assert group["seconds"] is group["calls"] is group["share"] is None


def test_devices_are_those_of_explain(executable):
    first, second = report_of(executable)["devices"]
    assert (first["name"], first["kind"], first["ops"], first["transfers_in"]) == ("llvm:0", "llvm", 1, 0)
    assert (second["ops"], second["param_bytes"], second["transfers_in"]) == (3, 544, 1)
    stored = [executable.memory_plan.weights(device) for device in range(2)]
    assert [first["constant_bytes"], second["constant_bytes"]] == stored


def test_tables_are_those_of_explain(executable):
    tables = {table["id"]: table for table in report_of(executable)["tables"]}
    assert {"ops", "transfers", "encodings", "kernels", "commands", "steps"} <= tables.keys()
    assert [row[0] for row in tables["ops"]["rows"]] == ["y", "lv2", "z", "s"]
    for table in tables.values():
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_a_packed_weight_says_how_it_is_stored(executable):
    data = report_of(executable)
    (layout,) = data["layouts"]
    assert named(data)["w"]["values"][0]["layout"] == layout["id"]
    assert (layout["shape"], layout["stored"], layout["padding"]) == ([16, 8], [1, 16, 8], [0, 0])


def test_stored_extents_are_rounded_up_to_tiles():
    operand = {"role": "rhs", "variable": "b", "shape": "nx10", "layout": "pack<outer=[1, 0] inner=[1:8, 0:4]>"}
    op = {"function": "main", "variable": "y", "op": "matmul", "device": "llvm:0"}
    (layout,) = layouts_of({"ops": [{**op, "operands": [{**operand, "encoding": "", "packed": "never"}]}]})
    assert layout["stored"] == [2, "ceil(n / 4)", 8, 4]
    assert layout["padding"] == [0, 6]


def test_measurements_are_with_the_kernels(measured):
    matmul = next(group for group in measured["groups"] if group["kernel"].startswith("matmul"))
    assert matmul["calls"] == 1
    assert matmul["seconds"] > 0
    assert sum(row["share"] for row in measured["profile"]["rows"]) == pytest.approx(1)
    assert measured["machine"]["cores"] > 0
    # The code is for any CPU, of which nothing was measured.
    assert measured["devices"][0]["peak"] is matmul["share_of_peak"] is matmul["bound"] is None


def test_the_timeline_has_every_step_of_every_call(measured):
    timeline = measured["timeline"]
    assert timeline["calls"] == 2
    assert {queue["device"] for queue in timeline["queues"]} == {"llvm:0", "llvm:1"}
    events = [event for queue in timeline["queues"] for event in queue["events"]]
    assert Counter(event["kind"] for event in events) == {"step": 4, "transfer": 2, "wait": 2}
    assert all(0 <= event["begin"] <= event["end"] for event in events)


def test_a_report_is_a_file_that_another_one_compares_with(executable, tmp_path):
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    executable.report(old, title="toy")
    executable.report(new, compare=old)
    assert data_of(old.read_text())["title"] == "toy"
    assert data_of(new.read_text())["title"] == "new"
    assert 'id="report-previous"' in new.read_text()


def test_data_alone_can_be_compared_with(executable, tmp_path):
    old = tmp_path / "old.json"
    executable.report(old, title="toy")
    assert json.loads(old.read_text())["title"] == "toy"
    executable.report(tmp_path / "new.html", compare=old)
    assert 'id="report-previous"' in (tmp_path / "new.html").read_text()


@pytest.mark.parametrize("content", ["<html></html>", "{}", "{", "[]", "\0", '{"schema": 9}'])
def test_a_file_that_is_not_a_report_is_named(executable, tmp_path, content):
    (tmp_path / "other.html").write_text(content)
    with pytest.raises(rh.HeteroError, match=r"cannot compare with .*other\.html"):
        executable.report(tmp_path / "new.html", compare=tmp_path / "other.html")
    assert not (tmp_path / "new.html").exists()


@pytest.mark.parametrize("name", ["absent/report.html", "."])
def test_a_path_that_cannot_be_written_is_named(executable, tmp_path, name):
    with pytest.raises(rh.HeteroError, match="cannot write the report"):
        executable.report(tmp_path / name)


def test_an_executable_of_an_earlier_version_has_a_report_without_graph(executable):
    from dataclasses import replace

    older = rh.vm.Executable(executable.module, replace(executable.metadata, graph=None), executable.constants)
    data = report_of(older)
    assert data["nodes"] == data["edges"] == []
    assert len(data["groups"]) == 3


def test_the_memory_of_a_model_of_fixed_sizes_is_there():
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.exp(x))
        builder.emit_func_output(result)
    data = report_of(rh.compile(builder.get(), cache=False))
    assert [(row["function"], row["results"]) for row in data["memory"]] == [("main", 128)]
    (row,) = data["memory"]
    assert [value["kind"] for value in row["values"]] == ["result"]
    assert tvm.__version__ == data["versions"]["tvm"]


def test_the_most_that_is_alive_is_the_least_of_the_plan():
    x, w = (relax.Var(name, relax.TensorType((64, 64), "float32")) for name in "xw")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, w))
            result = builder.emit_output(relax.op.matmul(relax.op.nn.softmax(product), w))
        builder.emit_func_output(result)
    (row,) = report_of(rh.compile(builder.get(), cache=False))["memory"]
    assert max(row["over_time"]) == row["lower_bound"] > 0
    assert len(row["steps"]) == len(row["over_time"])
    assert all(0 <= value["first"] <= value["last"] < len(row["steps"]) for value in row["values"])
