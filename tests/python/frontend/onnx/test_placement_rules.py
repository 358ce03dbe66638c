"""Glob patterns over node names and op types."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser

import relax_hetero as rh
from relax_hetero.frontend.onnx import placement_rules
from relax_hetero.frontend.onnx.node_names import name_nodes
from relax_hetero.frontend.onnx.placement_rules import assign_devices
from relax_hetero.target.vdevice import device_name, parse_vdevices

MODEL = parser.parse_model("""
    <ir_version: 9, opset_import: ["" : 17, "my": 1]>
    g (float[2] x, bool c) => (float[2] y) {
        [enc_0] a = Relu(x)
        [enc_1] b = Neg(a)
        d = Relu(b)
        [call] e = my.Twice(d)
        [choice] y = If(c) <
            then_branch = t () => (float[2] p) { [inner] p = Neg(e) },
            else_branch = u () => (float[2] q) { q = Relu(e) }>
    }
    <opset_import: ["" : 17], domain: "my">
    Twice (v) => (w) { [half] h = Relu(v) w = Neg(h) }""")


def assigned(rules, model=MODEL, vdevices=("llvm", "c")):
    devices = parse_vdevices(list(vdevices))
    return {name: device_name(v, devices) for name, v in assign_devices(name_nodes(model), rules, devices).items()}


def on(device, rules, **options):
    return {name for name, found in assigned(rules, **options).items() if found == device}


def test_without_rules_everything_is_on_the_first_device():
    assert set(assigned({}).values()) == {"llvm:0"}


def test_names_in_any_graph_are_looked_at():
    assert set(assigned({})) == {
        "enc_0", "enc_1", "Relu_2", "call", "call/half", "call/Neg_1", "choice", "inner",
        "choice/else_branch/Relu_0",
    }  # fmt: skip


def test_patterns_match_names_and_op_types():
    assert on("c:0", {"enc_*": "c"}) == {"enc_0", "enc_1"}
    assert on("c:0", {"Neg": "c"}) == {"enc_1", "call/Neg_1", "inner"}
    assert on("c:0", {"enc_[1-9]": "c"}) == {"enc_1"}
    assert on("c:0", {"Relu_2": "vdevice:1"}) == {"Relu_2"}


def test_a_call_takes_its_body_along():
    body = {"call", "call/half", "call/Neg_1"}
    assert on("c:0", {"call": "c"}) == body
    assert on("c:0", {"Twice": "c"}) == body
    assert on("c:0", {"call/half": "c"}) == {"call/half"}


def test_the_first_match_wins():
    rules = [("enc_1", "llvm"), ("enc_*", "c"), ("*", "llvm")]
    assert on("c:0", rules) == {"enc_0"}
    assert on("c:0", dict(rules)) == {"enc_0"}
    assert on("c:0", list(reversed(rules))) == set()


def test_patterns_are_case_sensitive():
    with pytest.raises(rh.FrontendError, match="'relu' matches no node.*'Relu'"):
        assigned({"relu": "c"})


def test_names_with_brackets_match_themselves():
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { t = Relu(x) y = Neg(t) }'
    )
    model.graph.node[0].name = "block[0]"
    assert on("c:0", {"block[0]": "c"}, model=model) == {"block[0]"}


def test_a_letter_in_brackets_stands_for_itself():
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { t = Relu(x) y = Neg(t) }'
    )
    model.graph.node[0].name, model.graph.node[1].name = "block[0]*", "block0"
    assert on("c:0", {"block[[]0[]][*]": "c"}, model=model) == {"block[0]*"}
    assert on("c:0", {"block[0]": "c"}, model=model) == {"block0"}
    assert on("c:0", {"bloc[!m]0": "c", "block[[]0*": "llvm"}, model=model) == {"block0"}


def test_rules_may_name_each_of_thousands_of_nodes(monkeypatch):
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"], f"n[{i}]") for i in range(2000)]
    value = [helper.make_tensor_value_info(name, 1, [2]) for name in ("v0", "v2000")]
    model = helper.make_model(helper.make_graph(nodes, "g", value[:1], value[1:]))
    monkeypatch.setattr(placement_rules, "translate", lambda pattern: pytest.fail(f"{pattern} is tried on each node"))
    assert len(on("c:0", [(f"n[[]{i}]", "c" if i % 2 else "llvm") for i in range(2000)], model=model)) == 1000


def test_nodes_of_one_name_are_matched_together():
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { [n] t = Relu(x) [n] y = Neg(t) }'
    )
    assert on("c:0", {"n": "c"}, model=model) == {"n", "n_1"}
    assert on("c:0", {"n_1": "c"}, model=model) == {"n_1"}


def test_a_pattern_that_matches_nothing_lists_near_misses():
    with pytest.raises(rh.FrontendError, match="'end_0' matches no node's name or op type; near misses: 'enc_0'"):
        assigned({"end_0": "c"})
    with pytest.raises(rh.FrontendError, match="op types Relu, Neg, Twice, If"):
        assigned({"/transformer/*": "c"})


def test_a_device_that_is_not_listed():
    with pytest.raises(rh.VDeviceError, match="cuda.*available: llvm:0, c:0"):
        assigned({"*": "cuda"})


@pytest.mark.parametrize("rules", [["abc"], [("a",)], [(1, "llvm")], {1: "llvm"}])
def test_rules_of_another_shape(rules):
    with pytest.raises(rh.FrontendError, match="a pattern .* and a device"):
        assigned(rules)


def test_rules_that_are_not_a_collection():
    with pytest.raises(rh.FrontendError, match="placement is 5; expected a mapping"):
        assigned(5)


@settings(max_examples=50)
@given(st.lists(st.text("ab*?[]!-", max_size=5), min_size=1, max_size=4), st.text("ab*?[]!-", max_size=4))
def test_patterns_that_are_looked_up_match_as_globs_do(patterns, name):
    expected = {i for i, pattern in enumerate(patterns) if name == pattern or fnmatchcase(name, pattern)}
    assert placement_rules.Patterns(patterns).matching([name]) == expected
