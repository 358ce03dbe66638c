"""`R.hetero.cached_attention`: its type, its text, and what it refuses."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import EncodingError


@ir_module()
def Module(
    qkv: R.Tensor(("rows", 512), "float32"),
    pages: R.Tensor(("count", 2, 8192), "float16"),
    table: R.Tensor((4, 16), "int32"),
    sequences: R.Tensor(("rows",), "int32"),
    positions: R.Tensor(("rows",), "int32"),
    rotation: R.Tensor(("rows", 32), "float32"),
    k_norm: R.Tensor((64,), "float32"),
) -> R.Tuple(R.Tensor(("rows", 256), "float32"), R.Tensor(("count", 2, 8192), "float16")):
    with R.dataflow():
        y = R.hetero.cached_attention(
            qkv,
            pages,
            table,
            sequences,
            positions,
            rotation,
            k_norm,
            heads=4,
            kv_heads=2,
            size=64,
            scale=0.125,
            rotary="halves",
            norms="k",
        )
        R.output(y)
    return y


def test_type():
    (binding,) = Module["main"].body.blocks[0].bindings
    rows, pages = (Module["main"].params[i].ty.shape.values[0] for i in (0, 1))
    expected = tvm.ir.TupleType(
        [relax.TensorType([rows, 256], "float32"), relax.TensorType([pages, 2, 8192], "float16")]
    )
    assert_structural_equal(binding.var.ty, expected, map_free_vars=True)


def test_text_there_and_back():
    text = Module.script(show_meta=True)
    assert 'rotary="halves", norms="k"' in text
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


QKV, PAGES, TABLE = ((3, 512), "float32"), ((9, 2, 8192), "float16"), ((4, 16), "int32")
ROW, ROTATION, NORM = ((3,), "int32"), ((3, 64), "float32"), ((64,), "float32")


def infer(*types, **changed):
    attributes = {"heads": 4, "kv_heads": 2, "size": 64, "scale": 1.0, **changed}
    operands = (relax.Var(f"x{i}", relax.TensorType(*ty)) for i, ty in enumerate(types))
    return relax.BlockBuilder().normalize(rh.op.cached_attention(*operands, **attributes)).ty


def test_type_of_shared_values():
    qkv, pages = ((3, 5 * 96), "float32"), ((9, 1, 6144), "float16")
    inferred = infer(qkv, pages, TABLE, ROW, ROW, kv_heads=1, size=96, shared_values=64)
    assert [int(extent) for extent in inferred.fields[0].shape.values] == [3, 256]
    with pytest.raises(EncodingError, match="found shared_values=97, expected 0 to size=96"):
        infer(qkv, pages, TABLE, ROW, ROW, kv_heads=1, size=96, shared_values=97)


@pytest.mark.parametrize(("dtype", "elements"), [("float32", 8192), ("bfloat16", 8192), ("int8", 8192 + 512)])
def test_types_of_pages(dtype, elements):
    ty = infer(QKV, ((9, 2, elements), dtype), TABLE, ROW, ROW)
    assert ty.fields[1].dtype == dtype


@pytest.mark.parametrize(
    ("types", "attributes", "message"),
    [
        ([QKV, PAGES, TABLE, ROW, ROW, NORM], {}, "found 6 operands, expected 5: qkv, pages, table,"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"rotary": "pairs"}, "expected 6: .* positions, rotation"),
        ([((3, 384), "float32"), PAGES, TABLE, ROW, ROW], {}, r"operand 0 \(qkv\) has shape \[3, 384\], .*any, 512"),
        ([((3, 512), "int8"), PAGES, TABLE, ROW, ROW], {}, "expected a tensor of float32 or float16 or bfloat16"),
        ([QKV, ((9, 2, 8192), "int8"), TABLE, ROW, ROW], {}, r"operand 1 \(pages\) .* expected \(any, 2, 8704\)"),
        ([QKV, ((9, 2, 8192), "int32"), TABLE, ROW, ROW], {}, r"operand 1 \(pages\) .*float16 or bfloat16 or float32"),
        ([QKV, PAGES, ((4,), "int32"), ROW, ROW], {}, r"operand 2 \(table\)"),
        ([QKV, PAGES, TABLE, ((4,), "int32"), ROW], {}, r"operand 3 \(sequences\) has shape \[4\], expected \(3\)"),
        ([QKV, PAGES, TABLE, ROW, ((3,), "int64")], {}, r"operand 4 \(positions\)"),
        ([QKV, PAGES, TABLE, ROW, ROW, ((3, 66), "float32")], {"rotary": "halves"}, "rows of 66, expected an even"),
        ([QKV, PAGES, TABLE, ROW, ROW, ((3, 63), "float32")], {"rotary": "halves"}, "rows of 63, expected an even"),
        ([QKV, PAGES, TABLE, ROW, ROW, NORM, ((32,), "float32")], {"norms": "qk"}, r"operand 6 \(k_norm\)"),
        ([QKV, PAGES, TABLE, ROW, ROW, NORM], {"sinks": True}, r"operand 5 \(sinks\) .* expected \(4\)"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"heads": 3}, "found 3 heads of queries, expected a multiple of the 2"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"rows": "both"}, "found rows='both', expected one of"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"norms": "kq"}, "found norms='kq', expected one of"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"rotary": "neox"}, "found rotary='neox', expected one of"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"window": -1}, "found window=-1, expected 0 or more"),
        ([QKV, PAGES, TABLE, ROW, ROW], {"scale": float("nan")}, "found scale=nan"),
    ],
)
def test_operands_that_do_not_fit(types, attributes, message):
    with pytest.raises(EncodingError, match=message):
        infer(*types, **attributes)
