"""Reports on encoded modules at several stages."""

from __future__ import annotations

from tvm.script import relax as R

import relax_hetero  # noqa: F401 (registers R.hetero)
from modules import ir_module
from relax_hetero.transform.encode.specialize_encodings import describe_encodings
from relax_hetero.transform.ir.remarks import collect_encodings, publish
from relax_hetero.transform.ir.reports import CancelledEntry, EncodedTransferEntry, EncodingReport

LHS, RHS, OUT = (
    f"matmul[{index}]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=64, k=40>" for index in range(3)
)
TILED = "pack<outer=[1, 0] inner=[1:48]>"
SMALL = "pack<outer=[0, 1] inner=[0:4, 1:4]>"


@ir_module({"kind": "llvm"}, ({"kind": "c"}, 1))
def TwoDevices(
    x: R.Tensor(("n", 40), "float32", "llvm:0"),
    w: R.Tensor((40, 64), "float32", "llvm:0"),
    bias: R.Tensor((64,), "float32", "llvm:0"),
) -> R.Tensor(("n", 64), "float32", "c:0"):
    a = R.hetero.set_encoding(x, LHS, "identity<2>")
    b = R.hetero.set_encoding(w, RHS, TILED)
    y = R.hetero.matmul(a, b, encoding=OUT, layout="identity<2>", kernel="matmul_llvm_0")
    z = R.hetero.elementwise(y, bias, expression="add(x0, x1)", encoding=OUT, layout="identity<2>")
    r = R.hetero.elementwise(z, expression="relu(x0)", encoding=OUT, layout="identity<2>")
    packed = R.hetero.relayout(r, OUT, SMALL, "identity<2>")
    moved = R.to_vdevice(packed, "c:0")
    out = R.hetero.unset_encoding(moved, OUT, SMALL)
    return out


def test_a_product_has_its_epilogue_and_its_operands():
    (op,) = describe_encodings(TwoDevices).ops
    assert (op.function, op.variable, op.op, op.device, op.kernel) == ("main", "y", "matmul", "llvm:0", "matmul_llvm_0")
    assert op.epilogue == "relu(add(x0, x1))"
    lhs, rhs, result = op.operands
    assert [o.role for o in op.operands] == ["lhs", "rhs", "result"]
    assert (lhs.variable, lhs.shape, lhs.packed, lhs.bytes_before) == ("a", "nx40", "never", "n * 160")
    assert (rhs.layout, rhs.bytes_before, rhs.bytes_after, rhs.packed) == (TILED, 10240, 15360, "at run time")
    assert (result.variable, result.packed, result.encoding) == ("r", "never", OUT)


def test_a_transfer_names_its_layout_and_who_lays_out_anew():
    assert describe_encodings(TwoDevices).transfers == [
        EncodedTransferEntry(
            "main", "moved", "llvm:0", "c:0", SMALL, "(n + 3) // 4 * 1024", f"on llvm:0: identity<2> to {SMALL}"
        )
    ]


def test_json_round_trip():
    report = describe_encodings(TwoDevices, [CancelledEntry("main", "q", "matmul", "cuda:0", "no resolver")])
    assert EncodingReport.from_json(report.to_json()) == report
    assert len(report.ops) == len(report.transfers) == len(report.cancelled) == 1


def test_reports_reach_every_open_collection():
    with collect_encodings() as outer, collect_encodings() as inner:
        publish(EncodingReport())
    publish(EncodingReport())
    assert outer == inner == [EncodingReport()]


# An initial accumulator, a product that two read, and elementwise work that follows no product of its own.
@ir_module()
def Uncommon(
    x: R.Tensor((2, 40), "float32"), w: R.Tensor((40, 64), "float32"), c: R.Tensor((2, 64), "float32")
) -> R.Tensor((2, 64), "float32"):
    a = R.hetero.set_encoding(x, LHS)
    b = R.hetero.set_encoding(w, RHS)
    start = R.hetero.set_encoding(c, OUT)
    y_encoded = R.hetero.matmul(a, b, start, encoding=OUT)
    z_encoded = R.hetero.elementwise(y_encoded, y_encoded, start, expression="add(x0, x2)", encoding=OUT)
    s_encoded = R.hetero.elementwise(start, y_encoded, expression="multiply(x0, x1)", encoding=OUT)
    t_encoded = R.hetero.elementwise(s_encoded, z_encoded, expression="add(x0, x1)", encoding=OUT)
    t = R.hetero.unset_encoding(t_encoded, OUT)
    return t


def test_values_with_two_readers_are_not_fused_and_keep_their_names():
    entries = describe_encodings(Uncommon).ops
    assert [(entry.variable, entry.op, entry.epilogue, entry.device) for entry in entries] == [
        ("y", "matmul", "", ""),
        ("z", "add(x0, x2)", "", ""),
        ("s", "multiply(x0, x1)", "", ""),
        ("t", "add(x0, x1)", "", ""),
    ]
    assert [operand.role for operand in entries[0].operands] == ["lhs", "rhs", "init", "result"]
    assert [operand.variable for operand in entries[1].operands] == ["y_encoded", "y_encoded", "start", "z_encoded"]
    # No device has been asked yet.
    assert {(o.layout, o.packed, o.bytes_after - o.bytes_before) for e in entries for o in e.operands} == {
        ("", "never", 0)
    }
