"""`R.hetero.require`: a statement that every pass keeps, and the error of a call that does not meet it."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.errors import BuildError, EncodingError, HeteroError, PlacementError
from relax_hetero.op.require import REQUIREMENT


@ir_module()
def Module(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")):
    n = T.int64()
    m = T.int64()
    found = T.int64()
    with R.dataflow():
        a = R.exp(x)
        R.hetero.require(n == m, "Add node 'sum': x and y have one size")
        R.hetero.require(T.Or(n == 1, n == 3), "Add node 'sum': x has one row or three")
        b = R.add(R.tanh(a), a)
        places = R.match_cast(R.nonzero(b), R.Tensor((2, found), "int64"))
        R.hetero.require(found <= 8, "NonZero node 'few': it finds eight at most")
        c = R.add(places, places)
        R.output(b, c)
    return (b, c)


def test_text_there_and_back():
    text = Module.script()
    assert "R.match_cast(R.hetero.requirement(n == m, message=\"Add node 'sum': x and y have one size\")" in text
    assert_structural_equal(tvm.script.from_source(text), Module)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


def test_stock_passes_keep_it():
    stock = relax.transform
    passes = [
        stock.Normalize(), stock.FoldConstant(), stock.DeadCodeElimination(), stock.CanonicalizeBindings(),
        stock.LegalizeOps(), stock.AnnotateTIROpPattern(), stock.FuseOps(), stock.FuseTIR(), stock.LambdaLift(),
        stock.DeadCodeElimination(), stock.ToNonDataflow(), stock.RemovePurityChecking(), stock.CallTIRRewrite(),
    ]  # fmt: skip
    mod = Module
    for each in passes:
        mod = each(mod)
        assert ops_of(mod).count(REQUIREMENT) == 3, each.info.name
        assert relax.analysis.well_formed(mod) is None


def rows(count, value=1.0):
    return np.full((count, 4), value, "float32")


@pytest.fixture(scope="module")
def machine():
    return rh.vm.VirtualMachine(rh.compile(Module, cache=False))


@pytest.mark.parametrize(
    ("n", "m", "message"),
    [
        (
            3, 2,
            "function 'main': Add node 'sum': x and y have one size (n = 3, m = 2); n is dimension 0 of argument 'x', "
            "m is dimension 0 of argument 'y'",
        ),
        (2, 2, "function 'main': Add node 'sum': x has one row or three (n = 2); n is dimension 0 of argument 'x'"),
        (3, 3, "function 'main': NonZero node 'few': it finds eight at most (found = 12)"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_meet_it(machine, n, m, message):
    for call in (lambda *args: machine["main"](*args), lambda *args: machine.submit("main", *args).result()):
        with pytest.raises(HeteroError) as info:
            call(rows(n), rows(m))
        assert str(info.value) == message
    b, c = machine["main"](rows(1, 0.0), rows(1))  # the machine remains usable
    assert b.shape == (1, 4)
    assert c.numpy().tolist() == [[0, 0, 0, 0], [0, 2, 4, 6]]


def test_stock_machine():
    executable = tvm.compile(Module, target=rh.native("llvm"), relax_pipeline=rh.get_pipeline())
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    with pytest.raises(HeteroError, match="x and y have one size"):
        main(tvm.runtime.tensor(rows(3)), tvm.runtime.tensor(rows(2)))
    assert main(tvm.runtime.tensor(rows(1)), tvm.runtime.tensor(rows(1)))[0].shape == (1, 4)


def build(condition, message="it holds", bound=None):
    """A module that requires `condition` of sizes n and m."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    x, y = (relax.Var(name, relax.TensorType([size, 4], "float32")) for name, size in (("x", n), ("y", m)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            rh.op.require(condition(n, m), message)
            result = builder.emit_output(builder.emit(relax.op.exp(x)))
        builder.emit_func_output(result)
    mod = builder.get()
    return relax.transform.BindSymbolicVars(bound)(mod) if bound else mod


def test_a_condition_that_is_proven_vanishes():
    for mod in (build(lambda n, m: n >= 0), build(lambda n, m: n == m, bound={"n": 3, "m": 3})):
        native = rh.target.vdevice.with_vdevices(mod, [rh.target.vdevice.VDevice(rh.native("llvm"))])
        assert "refuse_sizes" not in rh.get_pipeline()(native).script()


def test_a_condition_that_never_holds_is_an_error_of_the_compiler():
    with pytest.raises(BuildError, match="function 'main': it holds"):
        rh.compile(build(lambda n, m: n == m, bound={"n": 3, "m": 4}), cache=False)
    with pytest.raises(BuildError, match="function 'main': it holds"):
        rh.compile(build(lambda n, m: n < 0), cache=False)


def test_division_after_an_or_is_not_reached():
    main = rh.vm.VirtualMachine(rh.compile(build(lambda n, m: tirx.Or(m == 0, tirx.floormod(n, m) == 0)), cache=False))[
        "main"
    ]
    assert main(rows(3), rows(0)).shape == (3, 4)
    assert main(rows(4), rows(2)).shape == (4, 4)
    with pytest.raises(HeteroError, match=r"it holds \(m = 2, n = 3\)"):
        main(rows(3), rows(2))


def test_refusals():
    with pytest.raises(EncodingError, match="expected a boolean expression over sizes"):
        build(lambda n, m: n + m)
    with pytest.raises(EncodingError, match="expected a boolean expression over sizes"):
        build(lambda n, m: "n == m")
    with pytest.raises(PlacementError, match="no function is under construction"):
        rh.op.require(tirx.Var("n", "int64") == 1, "one")
