"""Remarks of passes: kept by modules that ask for them, the same from a Sequential and from rh.compile."""

import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import check_pass, ir_module
from relax_hetero.transform.ir.declare import declare_pass
from relax_hetero.transform.ir.remarks import record_missed, records_remarks, remarks_of, with_remarks
from relax_hetero.transform.ir.reports import (
    CancelledEntry,
    EncodingReport,
    FusionReport,
    MissedFusion,
    PlacementEntry,
    PlacementReport,
)


@ir_module("llvm", "c")
def Before(x: R.Tensor((8, 16), "float32", "llvm:0"), w: R.Tensor((16, 8), "float32", "llvm:0")):
    with R.dataflow():
        a = R.matmul(x, w)
        b = R.to_vdevice(a, "c:0")
        c = R.exp(b)
        R.output(c)
    return c


@ir_module("llvm", "c")
class Expected:
    I.module_attrs({"relax_hetero.fusions": '{"dispatches": [], "missed": []}'})

    @R.function
    def main(x: R.Tensor((8, 16), "float32", "llvm:0"), w: R.Tensor((16, 8), "float32", "llvm:0")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.to_vdevice(a, "c:0")
            c = R.exp(b)
            R.output(c)
        return c


def test_a_module_keeps_findings_from_a_pass_on():
    after = check_pass(rh.transform.RecordRemarks(), Before, Expected)
    assert records_remarks(after) and not records_remarks(Before)


def test_other_modules_are_not_touched():
    placed = rh.transform.RealizeVDevice()(Before)
    assert remarks_of(placed).placement is None and not placed.attrs


def test_a_sequential_and_compile_find_the_same():
    lowered = rh.get_pipeline()(Before)
    direct, later = rh.compile(Before).metadata, rh.compile(lowered).metadata
    assert direct.placement and direct.encodings["ops"] and direct.fusions["dispatches"]
    for name in ("placement", "placement_estimate", "encodings", "fusions", "single_calls"):
        assert getattr(later, name) == getattr(direct, name), name


def test_a_record_survives_stock_passes_json_and_text():
    report = PlacementReport([PlacementEntry("main", "a", "relax.matmul", "llvm:0", 0, "a reason", 256, "op")])
    mod = with_remarks(rh.transform.RecordRemarks()(Before), placement=report, placement_estimate={"seconds": 1.5})
    stock = tvm.transform.Sequential(
        [tvm.relax.transform.CanonicalizeBindings(), tvm.relax.transform.LegalizeOps(), tvm.relax.transform.FuseOps()]
    )(mod)
    for each in (stock, tvm.ir.load_json(tvm.ir.save_json(mod)), tvm.script.from_source(mod.script())):
        assert remarks_of(each) == remarks_of(mod)
        assert remarks_of(each).placement == report and remarks_of(each).fusions == FusionReport()
    assert remarks_of(mod).placement is remarks_of(mod).placement  # parsed once
    assert remarks_of(with_remarks(mod, placement=None)).placement is None


def declining(mod: tvm.IRModule, reason: str, again: bool = False) -> tvm.IRModule:
    if again:
        mod = Declining(reason)(mod)
    record_missed("main", "a", "matmul", reason)
    return mod


Declining = declare_pass("Declining", declining)


def test_declined_ops_are_in_the_module_that_the_pass_returns():
    recorded = rh.transform.RecordRemarks()(Before)
    mod = tvm.transform.Sequential([Declining("one"), Declining("two"), Declining("one", again=True)])(recorded)
    assert remarks_of(mod).fusions.missed == [MissedFusion("main", "a", "matmul", each) for each in ("one", "two")]
    assert remarks_of(recorded).fusions.missed == []
    with rh.transform.collect_fusions() as outer, rh.transform.collect_fusions() as inner:
        assert Declining("three")(Before).same_as(Before)
    assert outer.missed == inner.missed == [MissedFusion("main", "a", "matmul", "three")]


def test_cancelled_encodings_stay_in_the_remarks():
    cancelled = CancelledEntry("main", "q", "matmul", "c:0", "no layout")
    mod = with_remarks(rh.transform.RecordRemarks()(Before), encodings=EncodingReport([], [], [cancelled]))
    mod = tvm.transform.Sequential(
        [rh.transform.RealizeVDevice(), rh.transform.SetEncoding(), rh.transform.SpecializeEncodings()]
    )(mod)
    report = remarks_of(mod).encodings
    assert report.cancelled == [cancelled] and [entry.variable for entry in report.ops] == ["a"]
    again = tvm.transform.Sequential([rh.transform.MaterializeEncodings(), rh.transform.SpecializeEncodings()])(mod)
    assert remarks_of(again).encodings == report


def test_an_updated_vdevice_takes_the_old_placement_off():
    placed = rh.transform.RealizeVDevice()(rh.transform.RecordRemarks()(Before))
    assert remarks_of(placed).placement is not None
    assert remarks_of(rh.transform.UpdateVDevice(rh.VDevice("llvm"), 1)(placed)).placement is None
