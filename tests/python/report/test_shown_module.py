"""`rh.show`: a picture for notebooks, a table for terminals, a page for browsers."""

import xml.etree.ElementTree as ET

import pytest
import tvm

import relax_hetero as rh
from relax_hetero.report import shown_module
from relax_hetero.report.page import data_of
from relax_hetero.report.shown_module import layers_of
from report.toy_model import Model


def test_a_notebook_shows_a_box_for_each_node_in_the_colour_of_its_device():
    root = ET.fromstring(rh.show(Model)._repr_html_().replace("&nbsp;", " "))
    (picture,) = root.iter("svg")
    assert picture.get("role") == "img" and picture.get("aria-label") == "Graph of main: 9 nodes"
    boxes = {"".join(g.find("text").itertext()): g.find("rect").get("stroke") for g in picture.iter("g")}
    assert set(boxes) == {"x", "w", "b", "exp", "to llvm:1", "matmul", "add", "nn.softmax", "output"}
    assert boxes["x"] == boxes["exp"] != boxes["matmul"] == boxes["to llvm:1"]
    transfers = [path for path in picture.iter("path") if path.get("stroke-dasharray")]
    assert len(transfers) == 2 and len(list(picture.iter("path"))) == 8
    assert len(list(root.iter("tr"))) == 10, "the same as a table"


def test_boxes_do_not_overlap_and_edges_lead_down():
    data = rh.show(rh.transform.trace_passes(Model).result).data
    for function in [each["name"] for each in data["functions"]]:
        picture = ET.fromstring(shown_module.function_picture(data, function))
        boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in picture.iter("rect")]
        right, bottom = (float(part) for part in picture.get("viewBox").split()[2:])
        for number, (x, y, width, height) in enumerate(boxes):
            assert x >= 0 and x + width <= right and y >= 0 and y + height <= bottom
            for other_x, other_y, *_ in boxes[number + 1 :]:
                assert abs(x - other_x) >= width or abs(y - other_y) >= height


def test_a_terminal_shows_a_table():
    shown = rh.show(Model)
    lines = str(shown).splitlines()
    assert lines[0].split() == ["function", "value", "op", "device", "type", "reads", "kernel"]
    assert lines[6].split() == ["main", "lv2", "matmul", "llvm:1", "float32[n,", "8]", "lv1,", "w"]
    assert lines[-1] == "4 ops on 2 devices, 1 transfer."
    assert repr(shown) == "<ShownModule of main>"


def test_a_page_is_saved(tmp_path):
    rh.show(Model, "a toy").save(tmp_path / "toy.html")
    data = data_of((tmp_path / "toy.html").read_text())
    assert (data["kind"], data["title"]) == ("module", "a toy")
    assert [node["name"] for node in data["nodes"] if node["kind"] == "op"] == ["y", "lv2", "z", "s"]
    with pytest.raises(rh.HeteroError, match="cannot write the report .*toy.html: there is no folder"):
        rh.show(Model).save(tmp_path / "no" / "toy.html")


def test_a_function_that_is_too_large_for_a_picture_is_a_table(monkeypatch):
    monkeypatch.setattr(shown_module, "MAX_NODES", 5)
    html = rh.show(Model)._repr_html_()
    assert "<svg" not in html and "too large for a picture" in html and "nn.softmax" in html


def test_an_argument_that_is_not_a_module_is_refused():
    with pytest.raises(rh.HeteroError, match="rh.show: found .* rh.from_onnx imports it; expected a tvm.IRModule"):
        rh.show("model.onnx")
    with pytest.raises(rh.HeteroError, match="found no Relax function in a module of 0 functions"):
        rh.show(tvm.IRModule({}))


def test_rows_of_a_picture():
    layers = layers_of([0, 1, 2, 4, 3], [(0, 1), (1, 2), (0, 3), (2, 3), (4, 3)], close=[0, 4])
    assert [sorted(node for node in row if node >= 0) for row in layers.rows] == [[0], [1], [2, 4], [3]]
    assert len(layers.paths[0, 3]) == 4, "it passes two rows"
    assert layers_of([], []).rows == []
