"""Nodes in any order, in graphs inside of nodes and in functions too; cycles and missing values are named."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import relax_hetero as rh

HEAD = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>'


def test_nodes_in_any_order():
    model = parser.parse_model(f"""{HEAD}
        g (float[2] x, bool c, int64 n) => (float[2] y, float[2] z) {{
            y = Add(chosen, called)
            z = Loop(n, , called) <body = b (int64 i, bool go, float[2] state) => (bool on, float[2] next) {{
                next = Add(turned, base)  turned = Neg(state)  on = Identity(go) }}>
            called = own.twice(base)
            chosen = If(c) <
                then_branch = t () => (float[2] p) {{ p = Neg(inner)  inner = Exp(called) }},
                else_branch = e () => (float[2] q) {{ q = Abs(base) }}>
            base = Relu(x)
        }}
        <domain: "own", opset_import: ["" : 17]> twice (a) => (b) {{ b = Add(h, h)  h = Exp(a) }}""")
    written = model.SerializeToString()
    y, z = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](
        x=np.array([-1, 1], "float32"), c=np.array(True), n=np.array(3)
    )
    base = np.array([0, 1], "float32")
    called = 2 * np.exp(base)
    np.testing.assert_allclose(y.numpy(), called - np.exp(called), rtol=1e-5)
    np.testing.assert_allclose(z.numpy(), base - called, rtol=1e-5)
    assert model.SerializeToString() == written, "the caller's model was changed"
    assert rh.onnx_report(model)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("[a] y = Add(x, z)  [b] z = Neg(w)  [c] w = Exp(y)", "cycle of nodes.*'a' .Add., 'b' .Neg., 'c' .Exp."),
        ("[a] y = Add(x, y)", "cycle of nodes.*'a' .Add."),
        ("[project] y = Add(x, w)", "input 1 of node 'project' .Add., 'w', has no producer"),
        ("y = Sub(x, w)", "input 1 of node 'Sub_0' .Sub., 'w', has no producer"),
        (
            "y = If(c) <then_branch = t () => (float[2] p) { [deep] p = Add(w, x) }, "
            "else_branch = e () => (float[2] q) { q = Abs(x) }>",
            "input 0 of node 'deep' .Add., 'w', has no producer",
        ),
    ],
)
def test_cycles_and_missing_values_are_named(nodes, message):
    model = parser.parse_model(f"{HEAD} g (float[2] x, bool c) => (float[2] y) {{ {nodes} }}")
    with pytest.raises(rh.FrontendError, match=message) as caught:
        rh.from_onnx(model)
    assert "sorted" not in str(caught.value)
