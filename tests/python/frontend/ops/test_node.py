"""What a node requires of sizes that only a call knows."""

import pytest
from tvm import relax, tirx

from relax_hetero.errors import FrontendError
from relax_hetero.frontend.ops.node import Node


def test_require():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([n, m], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            node = Node("Add", "sum", 18, builder, [x], {}, 1)
            node.require(n + 1 == 1 + n, "always")
            node.require(n == m, "x and y have one size")
            with pytest.raises(FrontendError, match="Add node 'sum': never"):
                node.require(n == n + 1, "never")
            with pytest.raises(FrontendError, match="Add node 'sum': no"):
                node.require(False, "no")
            result = builder.emit_output(x)
        builder.emit_func_output(result)
    text = builder.get().script()
    assert text.count("R.hetero.requirement(") == 1
    assert "R.hetero.requirement(n == m, message=\"Add node 'sum': x and y have one size\")" in text
