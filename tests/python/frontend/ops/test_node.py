"""Requirements of a node on sizes that only a call knows."""

import pytest
from tvm import relax, tirx
from tvm.ir import assert_structural_equal

from modules import calls_of
from relax_hetero.errors import FrontendError
from relax_hetero.frontend.ops.node import Node
from relax_hetero.op.require import REQUIREMENT


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
    (requirement,) = calls_of(REQUIREMENT, builder.get())
    assert_structural_equal(requirement.args[0], n == m)
    assert requirement.attrs.message == "Add node 'sum': x and y have one size"
