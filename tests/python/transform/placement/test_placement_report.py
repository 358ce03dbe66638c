"""Contents of placement reports."""

import json

import tvm
from tvm import relax
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.transform import RealizeVDevice
from relax_hetero.transform.placement.realize_vdevice import PlacementReport, collect_placement, realize_vdevice


@ir_module("llvm", "llvm:1")
def Example(
    c: R.Tensor((), "bool"),
    x: R.Tensor((2, 3), "float32", "llvm:1"),
    y: R.Tensor(("n", 3), "float32"),
    z: R.Tensor((4,), "float16"),
):
    a = R.exp(x)
    b = R.add(a, R.const(1.0))
    d = R.to_vdevice(b, "llvm:0")
    e = R.exp(y)
    f = R.tanh(z)
    g = R.hint_on_device(f, tvm.cpu(1))
    if c:
        r = R.exp(d)
    else:
        r = R.tanh(d)
    return (r, e, g)


def by_variable(report: PlacementReport) -> dict[tuple[str, str], tuple[str, str, str, int | None]]:
    return {(e.variable, e.kind): (e.op, e.device, e.reason, e.bytes) for e in report.entries}


def test_entries():
    _, report = realize_vdevice(Example)
    entries = by_variable(report)
    x = "the annotation of parameter 'x' of 'main'"
    assert entries["x", "param"] == ("parameter", "llvm:1", f"fixed by {x}", 24)
    assert entries["y", "param"] == ("parameter", "llvm:0", "default device", None)
    assert entries["z", "param"][1:] == (
        "llvm:1",
        "follows 'f' through relax.tanh, which is on llvm:1 by the hint_on_device of 'g' in 'main'",
        8,
    )
    assert entries["a", "op"][0:2] == ("relax.exp", "llvm:1")
    assert entries["b", "constant"] == ("constant", "llvm:1", "constant: used by 'b' on llvm:1", 4)
    assert entries["d", "transfer"] == ("relax.to_vdevice", "llvm:0", "transfer: relax.to_vdevice to llvm:0", 24)
    assert entries["e", "op"] == ("relax.exp", "llvm:0", "default device", None)
    assert entries["c_llvm_1", "transfer"] == ("relax.to_vdevice", "llvm:1", "transfer: needed by 'r' on llvm:1", 1)
    assert [entry.device_index for entry in report.entries] == [int(entry.device[-1]) for entry in report.entries]
    assert {entry.function for entry in report.entries} == {"main"}


def test_entries_name_the_variables_of_the_result():
    placed, report = realize_vdevice(Example)
    bound = {param.name for param in placed["main"].params}

    def visit(seq: relax.SeqExpr) -> None:
        for block in seq.blocks:
            for binding in block.bindings:
                bound.add(binding.var.name)
                if isinstance(binding.value, relax.If):
                    visit(binding.value.true_branch)
                    visit(binding.value.false_branch)

    visit(placed["main"].body)
    assert {entry.variable for entry in report.entries} <= bound


def test_inserted_transfers_say_for_whom():
    @ir_module("llvm", "llvm:1")
    def Mod(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1"), n: R.Shape(ndim=1)):
        a = R.concat((y, x))
        t = R.shape_to_tensor(n)
        u = R.to_vdevice(y, "llvm:0")
        b = R.call_pure_packed("f", u, t, ty_args=R.Tensor((2,), "float32"))
        return (a, b)

    entries = by_variable(realize_vdevice(Mod, insert_copies=True)[1])
    assert entries["x_llvm_1", "transfer"][2] == "transfer: needed by 'a' on llvm:1"
    assert entries["t_made", "op"][2] == "read or made by the host"
    assert entries["t", "transfer"][1:3] == ("llvm:0", "transfer: made on llvm:1, belongs on llvm:0")


def test_callees_and_clones():
    @ir_module("llvm", "llvm:1")
    class Mod:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a = R.exp(z)
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Mod
            a = cls.f(x)
            b = cls.f(y)
            return (a, b)

    _, report = realize_vdevice(Mod)
    entries = {entry.function: (entry.device, entry.reason) for entry in report.entries if entry.kind == "op"}
    assert entries == {
        "f": ("llvm:0", "called by 'main' on llvm:0"),
        "f_llvm_1": ("llvm:1", "called by 'main' on llvm:1"),
    }


def test_json():
    _, report = realize_vdevice(Example)
    text = report.to_json()
    assert PlacementReport.from_json(text) == report
    first = json.loads(text)[0]
    assert set(first) == {"function", "variable", "op", "device", "device_index", "reason", "bytes", "kind"}


def test_collecting():
    with collect_placement() as outer:
        RealizeVDevice()(Example)
        with collect_placement() as inner:
            RealizeVDevice()(Example)
        realize_vdevice(Example)
    assert (len(outer), len(inner)) == (3, 1) and outer[1] is inner[0]
    RealizeVDevice()(Example)
    assert len(outer) == 3
