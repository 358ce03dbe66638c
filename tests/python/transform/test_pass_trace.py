"""`trace_passes`: modules after each pass, differences, times; in a `with` block and on a module."""

import gc
import io
import json
import weakref

import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform.ir.rewriting import handle


@ir_module("llvm", "llvm:1")
class Model:
    @R.function
    def main(x: R.Tensor(("n", 8), "float32", "llvm:0")):
        with R.dataflow():
            y = R.nn.softmax(R.to_vdevice(x, "llvm:1"))
            R.output(y)
        return y

    @R.function
    def other(x: R.Tensor((4,), "float32", "llvm:0")):
        y = R.exp(x)
        return y


def renamed(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    mod.update_func(mod.get_global_var("other"), mod["other"].with_attr("touched", 1))  # in place
    return mod


IN_PLACE = tvm.transform.module_pass(renamed, opt_level=0, name="InPlace")


def failing(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    raise rh.EncodingError("no layout")


FAILS = tvm.transform.module_pass(failing, opt_level=0, name="Fails")


@pytest.fixture(scope="module")
def trace():
    return rh.transform.trace_passes(Model, [rh.transform.RealizeVDevice(), rh.transform.FormRows(), IN_PLACE])


def test_modules_are_kept_before_and_after_each_pass(trace):
    realize, rows, touched = trace.passes
    tvm.ir.assert_structural_equal(realize.before, Model)
    tvm.ir.assert_structural_equal(rows.before, rh.transform.RealizeVDevice()(Model))
    tvm.ir.assert_structural_equal(rows.after, rh.transform.FormRows()(rows.before))
    assert "touched" not in rows.after["other"].attrs, "a pass that writes in place does not reach into the past"
    assert touched.after["other"].attrs["touched"] == 1
    tvm.ir.assert_structural_equal(touched.after, trace.result)


def test_functions_that_a_pass_leaves_alone_are_shared(trace):
    rows = trace.find("FormRows")[0]
    assert handle(rows.before["other"]) == handle(rows.after["other"])


def test_differences_name_functions_and_hold_the_lines_that_changed(trace):
    rows, touched = trace.passes[1:]
    assert [change.function for change in rows.changes] == ["main"] and rows.changed
    (change,) = rows.changes
    assert (change.added, change.removed) == (1, 1)
    assert '-        y: R.Tensor((n, 8), dtype="float32", vdevice="llvm:1:global") = R.nn.softmax(lv' in change.diff
    assert 'ops="softmax")' in change.diff
    assert "+    R.func_attr" in touched.changes[0].diff


def test_the_table_shows_passes_times_and_lines(trace):
    lines = str(trace).splitlines()
    assert lines[0].split() == ["pass", "what", "changed", "no", "ms", "lines"]
    assert [line.split()[0] for line in lines[1:]] == ["RealizeVDevice", "FormRows", "InPlace"]
    assert lines[2].split()[1] == "main" and lines[2].endswith("+1 -1")
    assert all(one.seconds > 0 and one.outcome == "done" for one in trace.passes)
    assert repr(trace) == "<PassTrace of 3 passes>"


def test_show_prints_the_lines_of_one_pass(trace):
    out = io.StringIO()
    trace.show("FormRows", file=out)
    trace.show(3, "other", file=out)
    text = out.getvalue()
    assert text.startswith("2 FormRows: main\n--- main before\n+++ main after\n")
    assert "3 InPlace: other\n" in text
    out = io.StringIO()
    trace.show("FormRows", "other", file=out)
    assert out.getvalue() == "2 FormRows: main\n", "the function exists, and did not change"


def test_data_is_json(trace):
    data = json.loads(json.dumps(trace.to_data()))
    assert [one["name"] for one in data] == ["RealizeVDevice", "FormRows", "InPlace"]
    assert data[1]["changed"] and data[1]["functions"]["main"]["before_lines"] == 7
    assert data[1]["functions"]["main"]["diff"].startswith("--- main before")


def test_a_block_traces_every_sequential_inside_of_it():
    with rh.transform.trace_passes() as trace:
        mod = tvm.transform.Sequential([rh.transform.RealizeVDevice(), rh.transform.FormRows()], name="mine")(Model)
    rh.transform.FormRows()(Model)  # outside
    assert [(one.name, one.depth) for one in trace.passes] == [("mine", 0), ("RealizeVDevice", 1), ("FormRows", 1)]
    tvm.ir.assert_structural_equal(trace.find("mine")[0].after, mod)
    assert trace.result is None
    assert [line.split()[0] for line in str(trace).splitlines()[1:]] == ["mine", "RealizeVDevice", "FormRows"]


def test_a_block_keeps_the_settings_of_the_context_around_it():
    with tvm.transform.PassContext(opt_level=1, disabled_pass=["FormRows"]):
        with rh.transform.trace_passes() as trace:
            assert tvm.transform.PassContext.current().opt_level == 1
            tvm.transform.Sequential([rh.transform.RealizeVDevice(), rh.transform.FormRows()])(Model)
    assert "FormRows" not in [one.name for one in trace.passes]


def test_the_instrument_serves_a_context_of_ones_own():
    trace = rh.transform.trace_passes()
    with tvm.transform.PassContext(instruments=[trace.instrument]):
        rh.transform.RealizeVDevice()(Model)
    assert [one.name for one in trace.passes] == ["RealizeVDevice"]


def test_the_default_passes_are_those_of_compile():
    trace = rh.transform.trace_passes(Model)
    outer = [one.name for one in trace.passes if one.depth == 0]
    assert outer[0] == "RecordRemarks" and outer[-1] == "LowerToVM" and "FormSchedules" in outer
    assert len(str(trace).splitlines()) < len(trace.passes), "passes inside of others that change nothing are left out"
    assert str(trace).endswith("more inside of these changed nothing")


def test_modules_of_kernels_alone_are_timed_and_kept_only_when_asked():
    kernels = rh.transform.FormDispatches()(rh.transform.RealizeVDevice()(Model))
    kernels = tvm.IRModule({gv: f for gv, f in kernels.functions.items() if isinstance(f, tvm.tirx.PrimFunc)})
    simplify = tvm.tirx.transform.StmtSimplify()
    (timed,) = rh.transform.trace_passes(kernels, simplify).passes
    assert timed.seconds > 0 and not timed.is_kept and not timed.changes
    with pytest.raises(rh.HeteroError, match=r"kernels only: use trace_passes\(kernels=True\)"):
        _ = timed.before
    (traced,) = rh.transform.trace_passes(kernels, simplify, kernels=True).passes
    assert traced.is_kept


def test_a_pass_that_fails_is_in_the_table():
    trace = rh.transform.trace_passes()
    with pytest.raises(rh.EncodingError, match="no layout"), trace:
        tvm.transform.Sequential([rh.transform.RealizeVDevice(), FAILS])(Model)
    assert [one.outcome for one in trace.passes] == ["failed", "done", "failed"]
    assert "failed" in str(trace).splitlines()[-1]
    tvm.ir.assert_structural_equal(trace.passes[2].before, rh.transform.RealizeVDevice()(Model))
    with pytest.raises(rh.HeteroError, match="3, Fails: its module was not kept, as the pass failed"):
        trace.show("Fails")


def test_a_program_that_goes_on_after_a_failure_is_traced_further():
    modules = []

    def tries(mod, _ctx):
        with pytest.raises(rh.EncodingError):
            FAILS(mod)
        modules.append(rh.transform.RealizeVDevice()(mod))
        return modules[0]

    with rh.transform.trace_passes() as trace:
        tvm.transform.module_pass(tries, opt_level=0, name="Tries")(Model)
    assert [(one.name, one.outcome) for one in trace.passes] == [
        ("Tries", "done"),
        ("Fails", "failed"),
        ("RealizeVDevice", "done"),
    ]


def test_a_trace_that_nobody_holds_is_freed():
    trace = rh.transform.trace_passes(Model, rh.transform.RealizeVDevice())
    gone = weakref.ref(trace)
    del trace
    gc.collect()
    assert gone() is None


def test_unknown_names_and_objects_of_wrong_types(trace):
    with pytest.raises(rh.HeteroError, match="no pass 'FormRow' ran; passes that did: FormRows"):
        trace.show("FormRow")
    with pytest.raises(rh.HeteroError, match="the module has no function 'mian'; it has main, other"):
        trace.show("FormRows", "mian")
    with pytest.raises(rh.HeteroError, match="rh.from_onnx imports it; expected a tvm.IRModule"):
        rh.transform.trace_passes("model.onnx")
    with pytest.raises(rh.HeteroError, match="found passes without a module"):
        rh.transform.trace_passes(passes=[IN_PLACE])
    with pytest.raises(rh.HeteroError, match=r"expected a pass: did you mean FormRows\(\)"):
        rh.transform.trace_passes(Model, [rh.transform.FormRows])
    with pytest.raises(rh.HeteroError, match="found int, expected a pass"):
        rh.transform.trace_passes(Model, 3)
    with rh.transform.trace_passes() as opened, pytest.raises(rh.HeteroError, match="open already"):
        opened.__enter__()
