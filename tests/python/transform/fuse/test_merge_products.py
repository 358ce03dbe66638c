"""Products that only an attention reads become one; others stay."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from relax_hetero.op.attention import ATTENTION, attention
from relax_hetero.transform.fuse.merge_products import merge_products
from relax_hetero.transform.ir.blocks import rewrite_blocks
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings

HEADS = "(1, m, h*d) * (1, n, g*d) * (1, n, g*e) -> (1, m, h*e); b=1, h=4, g=4, m=5, n=5, d=8, e=8"


class Model:
    """Query, key and value of one or two tensors."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.x, self.y = (relax.Var(name, relax.TensorType((1, 5, 16), "float32")) for name in "xy")
        self.weight = relax.Var("w", relax.TensorType((16, 32), "float32"))
        self.builder = relax.BlockBuilder()

    def const(self, *shape: int) -> relax.Expr:
        return relax.const(self.rng.standard_normal(shape).astype("float32"))

    def product(self, x: relax.Var, weight: relax.Expr | None = None, bias: bool = True) -> relax.Var:
        result = self.builder.emit(relax.op.matmul(x, self.const(16, 32) if weight is None else weight))
        return self.builder.emit(relax.op.add(result, self.const(32))) if bias else result

    def merged(self, operands, also=None) -> list[relax.Expr]:
        """The values of the bindings, after merging, of attention to what `operands` makes."""
        with self.builder.function("main", [self.x, self.y, self.weight]):
            with self.builder.dataflow():
                values = operands()
                result = attention(*values, heads=HEADS)
                if also is not None:
                    result = relax.op.add(self.builder.emit(result), values[also])
                out = self.builder.emit_output(result)
            self.builder.emit_func_output(out)
        mod = self.builder.get()
        self.before = mod
        self.after = rewrite_blocks(mod, merge_products)
        return [binding.value for binding in walk_bindings(self.after["main"])]


def ops(values: list[relax.Expr]) -> list[str]:
    return [str(op_name(value)).removeprefix("relax.") for value in values]


def test_three_of_one_tensor() -> None:
    model = Model()
    values = model.merged(lambda: [model.product(model.x) for _ in range(3)])
    assert ops(values) == ["matmul", "add", "hetero.attention"]
    assert str(values[-1].attrs.heads).startswith("(1, m, h*d) * (1, n, g*d+32) * (1, n, g*e+64) ->")
    assert rewrite_blocks(model.after, merge_products).same_as(model.after)


def test_key_and_value_of_another_tensor() -> None:
    model = Model()
    values = model.merged(lambda: [model.product(model.x), model.product(model.y), model.product(model.y)])
    assert ops(values) == ["matmul", "add", "matmul", "add", "hetero.attention"]
    assert str(values[-1].attrs.heads).startswith("(1, m, h*d) * (1, n, g*d) * (1, n, g*e+32) ->")


def test_without_biases() -> None:
    model = Model()
    values = model.merged(lambda: [model.product(model.x, bias=False) for _ in range(3)])
    assert ops(values) == ["matmul", "hetero.attention"]


def test_one_without_a_bias_stays() -> None:
    model = Model()
    values = model.merged(lambda: [model.product(model.x, bias=index > 0) for index in range(3)])
    assert ops(values) == ["matmul", "matmul", "add", "hetero.attention"]


def test_weights_that_are_not_constants_stay() -> None:
    model = Model()
    model.merged(lambda: [model.product(model.x, model.weight) for _ in range(3)])
    assert model.after.same_as(model.before)


def test_a_product_that_something_else_reads_stays() -> None:
    model = Model()
    values = model.merged(lambda: [model.product(model.x) for _ in range(3)], also=0)
    assert ops(values).count("matmul") == 2
    assert ATTENTION.removeprefix("relax.") in ops(values)


def test_the_same_product_twice() -> None:
    model = Model()

    def operands() -> list[relax.Var]:
        query, both = model.product(model.x), model.product(model.x)
        return [query, both, both]

    values = model.merged(operands)
    assert ops(values) == ["matmul", "add", "hetero.attention"]
    assert str(values[-1].attrs.heads).startswith("(1, m, h*d) * (1, n, g*d+32) * (1, n, g*e+32) ->")
    assert isinstance(values[0].args[1], tvm.ir.GenericConst)
