"""`R.hetero.rows`: its type, its text, and what it refuses."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import EncodingError

SOFTMAX = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); divide(exp(subtract(x0, r0)), r1)"


@ir_module()
def Module(x: R.Tensor((2, "m", 8), "float32"), mask: R.Tensor(("m", 8), "float32")) -> R.Tensor(
    (2, "m", 1), "float32"
):
    with R.dataflow():
        y = R.hetero.rows(x, program="r0 = max(x0); exp(subtract(x0, r0))", ops="softmax")
        z = R.hetero.rows(y, mask, program="r0 = sum(multiply(x0, x1)); r0")
        R.output(z)
    return z


def test_types():
    first, second = Module["main"].body.blocks[0].bindings
    m = Module["main"].params[0].ty.shape.values[1]
    assert_structural_equal(first.var.ty, relax.TensorType([2, m, 8], "float32"), map_free_vars=True)
    assert_structural_equal(second.var.ty, relax.TensorType([2, m, 1], "float32"), map_free_vars=True)


def test_text_there_and_back():
    text = Module.script(show_meta=True)
    assert 'R.hetero.rows(y, mask, program="r0 = sum(multiply(x0, x1)); r0", ops="")' in text
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


def infer(program, *types):
    call = rh.op.rows(*(relax.Var(f"x{i}", ty) for i, ty in enumerate(types)), program=program)
    return relax.BlockBuilder().normalize(call).ty


@pytest.mark.parametrize(
    ("program", "shapes", "message"),
    [
        ("r0 = sum(x0); add(x0, x1)", [(2, 8)], "found 1 operands"),
        ("add(x0, x1)", [(2, 8), (2, 7)], "extent 7 where another has 8"),
        ("r0 = sum(x0); r0", [()], "scalars only"),
        ("r0 = sum(x0); r0", [None], "expected a tensor of known extents"),
    ],
)
def test_operands_that_do_not_fit(program, shapes, message):
    types = [relax.TensorType(shape, "float32", ndim=-1 if shape is not None else 2) for shape in shapes]
    with pytest.raises(EncodingError, match=message):
        infer(program, *types)


def test_element_types_that_differ_and_no_program():
    with pytest.raises(EncodingError, match="element types"):
        infer("add(x0, x1)", relax.TensorType([8], "float32"), relax.TensorType([8], "float16"))
    with pytest.raises(EncodingError, match="uses r0 before"):
        rh.op.rows(relax.Var("x", relax.TensorType([8], "float32")), program="add(x0, r0)")
    with pytest.raises(EncodingError, match="operand 0 is a int"):
        rh.op.rows(1, program=SOFTMAX)
