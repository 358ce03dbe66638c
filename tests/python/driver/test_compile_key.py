"""A key changes with all that an executable depends on; a module without a key is compiled every time, and says why."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from driver.cached_models import Linear, W, bound, compiled
from modules import ir_module
from relax_hetero.driver.compile_cache import compile_key, why_uncached
from relax_hetero.resolvers import CpuResolver
from relax_hetero.transform import collect_encodings, collect_fusions, collect_placement
from relax_hetero.transform.record.donated import with_donated


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))


def in_context(**options):
    with tvm.transform.PassContext(**options):
        return compile_key(bound(), True)


def renamed():
    return tvm.IRModule(
        {tvm.ir.GlobalVar("main" if gv.name_hint != "main" else "other"): f for gv, f in bound().functions.items()},
        global_infos=Linear.global_infos,
    )


def with_target(target):
    vdevice = relax.VDevice(tvm.target.Target(target), 0, "global")
    return tvm.IRModule(bound().functions, global_infos={"vdevice": [vdevice]})


CHANGES = {
    "a weight": lambda: compile_key(bound(np.nextafter(W, 1)), True),
    "its type": lambda: compile_key(bound(mod=Linear), True) and compile_key(bound(W.view("int32"), Integers), True),
    "a name": lambda: compile_key(renamed(), True),
    "a target": lambda: compile_key(with_target({"kind": "llvm", "mcpu": "x86-64-v2"}), True),
    "a module's attribute": lambda: compile_key(bound().with_attr("relax_hetero.placement", "[]"), True),
    "an option": lambda: compile_key(bound(), False),
    "an input that is donated": lambda: compile_key(with_donated(bound(), ["x"]), True),
    "a setting": lambda: in_context(config={"tirx.disable_vectorize": True}),
    "a pass left out": lambda: in_context(disabled_pass=["FuseOps"]),
    "the level": lambda: in_context(opt_level=0),
}


@ir_module({"kind": "llvm", "mcpu": "x86-64-v3"})
def Integers(x: R.Tensor((3, 8), "float32"), w: R.Tensor((8, 5), "int32")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        y = R.nn.relu(R.matmul(x, R.astype(w, "float32")))
        R.output(y)
    return y


@pytest.mark.parametrize("what", CHANGES)
def test_a_key_changes_with(what):
    assert CHANGES[what]() != compile_key(bound(), True) == compile_key(bound(), True)


def test_a_key_changes_with_where_equal_weights_are():
    """Two weights of one shape are not interchangeable."""

    @ir_module("llvm")
    def Two(x: R.Tensor((3,), "float32"), a: R.Tensor((3,), "float32"), b: R.Tensor((3,), "float32")):
        y = R.add(R.multiply(x, a), b)
        return y

    ones, twos = np.full(3, 1, "float32"), np.full(3, 2, "float32")
    keys = [
        compile_key(relax.transform.BindParams("main", {"a": a, "b": b})(Two), True)
        for a, b in ((ones, twos), (twos, ones), (ones, ones.copy()))
    ]
    assert len(set(keys)) == 3


def test_large_weights_are_hashed_whole():
    weight = np.zeros((8, 1 << 19), "float32")  # 16 MiB, in two pieces
    vdevice = {"vdevice": [relax.VDevice(tvm.target.Target("llvm"), 0, "global")]}
    keys = set()
    for place in (0, weight.size // 2, weight.size - 1):
        weight.flat[place] += 1
        x = relax.Var("x", relax.TensorType(weight.shape, "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            builder.emit_func_output(builder.emit(relax.op.add(x, relax.const(weight))))
        mod = tvm.IRModule(builder.get().functions, global_infos=vdevice)
        keys.add(compile_key(mod, True))
    assert len(keys) == 3


@tvm.instrument.pass_instrument
class Watch:
    def run_after_pass(self, mod, info):
        pass


@pytest.mark.parametrize("collect", [collect_placement, collect_encodings, collect_fusions])
def test_who_watches_sees_every_pass(collect):
    compiled()
    with collect():
        assert "report" in compiled().metadata.cache.why
    with tvm.transform.PassContext(instruments=[Watch()]):
        assert "instruments" in compiled().metadata.cache.why


def test_kernels_that_call_functions_of_this_process_are_not_kept():
    @ir_module("llvm")
    class Calls:
        @T.prim_func
        def kernel(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
            for i in range(4):
                y[i] = T.call_extern("float32", "floorf", x[i])

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            y = R.call_tir(Calls.kernel, (x,), out_ty=R.Tensor((4,), "float32"))
            return y

    exe = rh.compile(Calls, cache=True)
    assert exe.metadata.cache.why == "kernel 'kernel' calls the external function 'floorf'"


class Theirs(CpuResolver):
    pass


def test_resolvers_of_others_say_when_they_change(folder):
    theirs = Theirs()
    before = compile_key(bound(), True)
    remove = rh.encoding.register_resolver(theirs, "llvm", priority=100)
    try:
        assert "resolver of llvm devices" in compiled().metadata.cache.why
        theirs.cache_key = "1"
        assert why_uncached(bound()) == ""
        first = compile_key(bound(), True)
        theirs.cache_key = "2"
        assert len({before, first, compile_key(bound(), True)}) == 3
    finally:
        remove()


def test_modules_without_a_text_are_not_cached():
    mod = Linear.with_attr("theirs", tvm_ffi.convert(lambda: 1))
    assert "as JSON" in rh.compile(mod, cache=True).metadata.cache.why


def test_sources_that_changed_while_they_were_in_use_are_nobodys_key(monkeypatch):
    monkeypatch.setattr("relax_hetero.driver.cached_executables._IMPORT_TIME", 0.0)
    assert "sources" in compiled().metadata.cache.why
