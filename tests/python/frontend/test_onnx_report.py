"""Reports on a model before anything is compiled: every node, and everything missing at once."""

import json

import onnx.parser
import pytest

import relax_hetero as rh
from relax_hetero.errors import FrontendError

TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}]

# Refused: ops without a definition, also in a branch, and a form of an op; the type of one output is unknown.
BROKEN = """
<ir_version: 8, opset_import: ["" : 17, "acme" : 3, "com.microsoft" : 1]>
g (float[batch, 4] x, bool c) => (float[batch, 4] y, float[batch, 4] z)
<float[batch, 4] foo> {
    [first] a = Tanh (x)
    [nobodys] foo = acme.Spin (a)
    [between] b = Relu (foo)
    [form] d = LpPool <kernel_shape = [2], p = 0> (b)
    [sum] e = Add (b, x)
    [branches] f = If (c) <
        then_branch = t () => (float[batch, 4] t1) { [inner] t1 = acme.Turn (e) },
        else_branch = u () => (float[batch, 4] u1) { [other] u1 = Neg (e) }
    >
    [untyped] s = acme.Untyped (e)
    [behind] y = Relu (s)
    [last] z = Sigmoid (e)
}
"""


@pytest.fixture(scope="module")
def broken():
    return onnx.parser.parse_model(BROKEN)


def test_all_refused_nodes_are_in_one_report(broken):
    report = rh.onnx_report(broken)
    assert not report and not report.supported
    refused = {node.name: node.reason for node in report.refused}
    assert refused == {
        "nobodys": "no converter takes this op; @rh.frontend.register_op('acme', 'Spin') adds one",
        "form": "LpPool node 'form': p is 0, expected 1 or more",
        "branches": "it holds node 'inner' (acme.Turn), which cannot be imported",
        "inner": "no converter takes this op; @rh.frontend.register_op('acme', 'Turn') adds one",
        "untyped": "no converter takes this op; @rh.frontend.register_op('acme', 'Untyped') adds one",
    }
    unknown = {node.name: node.reason for node in report.nodes if node.status == "not looked at"}
    assert set(unknown) == {"other", "behind"} and "'untyped'" in unknown["behind"]
    assert {node.name for node in report.nodes if node.status == "supported"} == {"first", "between", "sum", "last"}
    opsets = {(node.domain, node.opset) for node in report.nodes}
    assert opsets == {("ai.onnx", 17), ("acme", 3)}
    for node in report.nodes:
        assert node.devices == (("llvm:0",) if node.status == "supported" else ())
    with pytest.raises(FrontendError):
        rh.from_onnx(broken)


def test_text_and_json_hold_every_refusal(broken):
    report = rh.onnx_report(broken, shapes={"batch": 2})
    text, data = " ".join(str(report).split()), json.loads(json.dumps(report.to_json()))
    assert data["supported"] is False and len(data["nodes"]) == 11
    for node in report.refused:
        assert node.name in text and node.reason in text
    assert "5 of 11 nodes refused" in text


def test_unknown_sizes_are_reported():
    """A form that is refused after a stand-in may be refused only because the stand-in's sizes are unknown."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[2, 4] x) => (float[a, b] y) <float[p, q] foo> {
            [strange] foo = acme.Spin (x)
            [form] y = LpPool <kernel_shape = [2], p = 0> (foo)
        }""")
    (_, form) = rh.onnx_report(model).refused
    assert form.name == "form" and "after the refused node 'strange', whose sizes are not known" in form.reason


def test_a_whole_model_is_supported_on_each_device():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (int64[1, m] y) { [relu] a = Relu (x) [find] y = NonZero (a) }""")
    report = rh.onnx_report(model, vdevices=TWO)
    assert report and report.devices == ("llvm:0", "llvm:1")
    assert [(node.name, node.status, node.devices) for node in report.nodes] == [
        ("relu", "supported", ("llvm:0", "llvm:1")),
        ("find", "supported", ("llvm:0", "llvm:1")),
    ]
    assert "2 nodes, all supported" in str(report)


def test_an_input_that_cannot_be_one_is_a_problem():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (string[2] words, float[2] x) => (float[2] y) { [look] a = acme.Look (words) [sum] y = Add (a, x) }""")
    report = rh.onnx_report(model)
    assert not report and "'words'" in report.problems[0] and "STRING" in report.problems[0]
    assert [(node.name, node.status) for node in report.nodes] == [("look", "refused"), ("sum", "not looked at")]
    assert report.problems[0] in " ".join(str(report).split())


def test_a_file_that_is_not_a_model_is_an_error(tmp_path):
    path = tmp_path / "model.ort"
    path.write_bytes(b"\x1c\0\0\0ORTM" + bytes(64))
    for ask in (rh.onnx_report, rh.from_onnx):
        with pytest.raises(FrontendError, match="ORT format.*give the ONNX file"):
            ask(path)
