"""R.hetero.attention: types, text, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import from_source
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.errors import EncodingError
from relax_hetero.op.attention import attention

HEADS = "(b, m, h*d) * (b, n, g*d) * (b, n, g*e) -> (b, m, h, e); b=2, h=4, g=2, m=5, n=7, d=8, e=3"

SLICES = "(b, m, h*d) * (b, n, g*d+32) * (b, n, g*e+64) -> (b, m, h*e); b=2, h=4, g=4, m=5, n=5, d=8, e=8"


def var(*shape: Any, dtype: str = "float32") -> relax.Var:
    return relax.Var("x", relax.TensorType(list(shape), dtype))


def typed(call: relax.Call) -> Any:
    return relax.BlockBuilder().normalize(call).ty


def test_type() -> None:
    ty = typed(attention(var(2, 5, 32), var(2, 7, 16), var(2, 7, 6), heads=HEADS))
    assert_structural_equal(ty, relax.TensorType([2, 5, 4, 3], "float32"))


def test_symbolic_type() -> None:
    b, m, n = (tvm.tirx.Var(name, "int64") for name in "bmn")
    heads = HEADS.replace("b=2", "b=?").replace("m=5", "m=?").replace("n=7", "n=?")
    ty = typed(attention(var(b, m, 32), var(b, n, 16), var(b, n, 6), heads=heads))
    assert_structural_equal(ty, relax.TensorType([b, m, 4, 3], "float32"))


def test_text_goes_round() -> None:
    @ir_module()
    def Module(x: R.Tensor((2, 5, 96), "float32"), mask: R.Tensor((2, 1, 1, 5), "float32")) -> R.Tensor(
        (2, 5, 32), "float32"
    ):
        with R.dataflow():
            y = R.hetero.attention(
                x,
                x,
                x,
                mask,
                heads=SLICES,
                scores="add(multiply(x0, 0.5), x1)",
                causal="top_left",
                nan_to_zero=True,
            )
            R.output(y)
        return y

    assert_structural_equal(from_source(Module.script()), Module)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 5, 32), (2, 7, 16)], {}, "found 2 operands"),
        ([(2, 5, 32), (2, 7, 16), (2, 7)], {}, "operand 2 has 2 dimensions"),
        ([(2, 5, 32), (2, 7, 16), (2, 7, 5)], {}, "operand 2 has a dimension of 5"),
        ([(2, 5, 32), (2, 7, 16), (2, 7, 6)], {"scores": "add(x0, x1)"}, "found 3 operands"),
        ([(2, 5, 32), (2, 7, 16), (2, 7, 6), (5, 6)], {"scores": "add(x0, x1)"}, "broadcasts"),
        ([(2, 5, 32), (2, 7, 16), (2, 7, 6), (1, 2, 4, 5, 7)], {"scores": "add(x0, x1)"}, "broadcasts"),
    ],
)
def test_calls_that_do_not_fit(shapes: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        call = relax.Call(
            tvm.ir.Op.get("relax.hetero.attention"),
            [var(*shape) for shape in shapes],
            attention(*[var(2, 5, 32)] * 3, **{"heads": HEADS, **options}).attrs,
        )
        typed(call)


def test_arguments_that_are_refused() -> None:
    x = var(2, 5, 32)
    with pytest.raises(EncodingError, match="found causal='left'"):
        attention(x, x, x, heads=HEADS, causal="left")
    with pytest.raises(EncodingError, match="operand 1 is a int"):
        attention(x, 3, x, heads=HEADS)  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="is not a map of heads"):
        attention(x, x, x, heads="heads")
