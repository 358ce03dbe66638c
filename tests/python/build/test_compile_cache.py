"""Compiled modules are found again where all that they depend on is the same, and only there."""

import logging
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.build import compile_cache
from relax_hetero.build.compile_key import compile_key, why_uncached
from relax_hetero.encoding.resolvers import CpuResolver
from relax_hetero.transform import collect_encodings, collect_fusions, collect_placement
from relax_hetero.vm.cache_use import HIT, MISS, UNUSED

X = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
W = np.random.default_rng(1).standard_normal((8, 5)).astype("float32")


@I.ir_module
class Linear:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "x86-64-v3"})]})

    @R.function
    def main(x: R.Tensor((3, 8), "float32"), w: R.Tensor((8, 5), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, w))
            R.output(y)
        return y


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of this test's executables."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "executables"


def compiled(cache=True, weight=W, **options):
    return rh.compile(Linear, {"w": weight}, cache=cache, **options)


def check(exe, weight=W):
    found = rh.vm.VirtualMachine(exe)["main"](X).numpy()
    np.testing.assert_allclose(found, np.maximum(X @ weight, 0), rtol=1e-5)


def files(folder, suffix=".so"):
    return sorted(file for file in folder.iterdir() if file.name.endswith(suffix))


def test_a_module_that_was_compiled_is_found(folder):
    first = compiled()
    assert first.metadata.cache.state == MISS and first.metadata.cache.seconds > 0
    assert files(folder) == [folder / f"{first.metadata.cache.key}.so"]
    second = compiled()
    assert second.metadata.cache == replace(first.metadata.cache, state=HIT)
    assert replace(second.metadata, cache=first.metadata.cache) == first.metadata
    check(first)
    check(second)
    assert files(folder, ".hits")[0].stat().st_size == 1


def test_no_pass_runs_where_it_is_found(monkeypatch):
    compiled()

    def refuse(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(sys.modules["relax_hetero.build.compile"], "_compile", refuse)  # the package's is the function
    check(compiled())
    with pytest.raises(AssertionError, match="compiled"):
        compiled(cache=False)


def test_it_is_found_by_another_process(tmp_path):
    script = tmp_path / "compile_it.py"
    script.write_text(
        "import numpy as np, relax_hetero as rh\n"
        "from build.test_compile_cache import Linear, W\n"
        "print(rh.compile(Linear, {'w': W}, cache=True).metadata.cache.state)\n"
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = os.pathsep.join([here, os.path.dirname(os.path.dirname(rh.__file__))])
    states = []
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
        states.append(done.stdout.split()[-1])
    assert states == [MISS, HIT]


def _compile_many(weights, start, results):
    start.wait()
    for weight in weights:
        exe = rh.compile(Linear, {"w": weight}, cache=True)
        check(exe, weight)
        results.put(exe.metadata.cache.state)


def test_processes_share_a_folder(folder):
    """Several compile, find and evict the same few modules at once; every one of them runs."""
    weights = [W * scale for scale in (1, 2, 3)]
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    os.environ["RELAX_HETERO_CACHE_SIZE"] = "100K"  # of two executables
    try:
        processes = [context.Process(target=_compile_many, args=(weights * 3, start, results)) for _ in range(3)]
        for process in processes:
            process.start()
        start.set()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    finally:
        del os.environ["RELAX_HETERO_CACHE_SIZE"]
    assert {results.get(timeout=10) for _ in range(27)} <= {HIT, MISS}
    assert sum(file.stat().st_size for file in files(folder)) <= 100 << 10
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def in_context(**options):
    with tvm.transform.PassContext(**options):
        return compile_key(bound(), True)


def bound(weight=W, mod=Linear):
    return relax.transform.BindParams("main", {"w": weight})(mod)


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
    "a setting": lambda: in_context(config={"tirx.disable_vectorize": True}),
    "a pass left out": lambda: in_context(disabled_pass=["FuseOps"]),
    "the level": lambda: in_context(opt_level=0),
}


@I.ir_module
class Integers:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "x86-64-v3"})]})

    @R.function
    def main(x: R.Tensor((3, 8), "float32"), w: R.Tensor((8, 5), "int32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, R.astype(w, "float32")))
            R.output(y)
        return y


@pytest.mark.parametrize("what", CHANGES)
def test_a_key_changes_with(what):
    assert CHANGES[what]() != compile_key(bound(), True) == compile_key(bound(), True)


def test_a_key_changes_with_where_equal_weights_are():
    """Of two weights of one shape it counts which is which."""

    @I.ir_module
    class Two:
        I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

        @R.function
        def main(x: R.Tensor((3,), "float32"), a: R.Tensor((3,), "float32"), b: R.Tensor((3,), "float32")):
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


@pytest.mark.parametrize("damage", ["a weight", "its code", "its end", "all of it", "a foreign file"])
def test_what_is_corrupt_is_made_anew(folder, caplog, damage):
    compiled()
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    if damage == "a weight":
        container = rh.load(file)._container
        data[container.weights[0].offset] ^= 1
    elif damage == "its code":
        data[4096] ^= 1
    elif damage == "its end":
        del data[-100:]
    else:
        data = bytearray() if damage == "all of it" else bytearray(b"text" * 1000)
    # As another file: the one that is loaded stays as it is.
    file.unlink()
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        again = compiled()
    assert again.metadata.cache.state == MISS and str(file) in caplog.text
    check(again)
    assert compiled().metadata.cache.state == HIT


def test_what_is_loaded_outlives_its_file(folder):
    compiled()
    exe = compiled()
    for file in folder.iterdir():
        file.unlink()
    check(exe)
    other = compiled()
    assert other.metadata.cache.state == MISS
    check(other)
    check(exe)


def test_an_executable_that_was_found_can_be_exported(tmp_path):
    compiled()
    compiled().export_library(tmp_path / "copy.so")
    check(rh.load(tmp_path / "copy.so"))


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, caplog, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        for scale in (1, 2):
            exe = compiled(blocked / "cache", W * scale)
            assert exe.metadata.cache.state == MISS and exe.metadata.cache.why.startswith("not kept")
            check(exe, W * scale)
    assert caplog.text.count("cannot be written") == 1


def test_without_a_c_compiler_nothing_is_kept(folder, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    exe = compiled()
    assert "C compiler" in exe.metadata.cache.why and not folder.exists() and not caplog.records
    check(exe)


def test_what_is_larger_than_the_folder_may_be_is_not_kept(folder, monkeypatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE_SIZE", "100")
    assert "its constants take" in compiled().metadata.cache.why
    assert not folder.exists()


def test_by_default_only_what_takes_long_is_kept(folder, monkeypatch):
    assert "less than 1 s" in compiled(cache=None).metadata.cache.why and not folder.exists()
    monkeypatch.setattr(compile_cache, "LEAST_SECONDS", 0.0)
    assert compiled(cache=None).metadata.cache.why == ""
    assert compiled(cache=None).metadata.cache.state == HIT


def test_it_is_switched_off(folder, monkeypatch):
    assert compiled(cache=False).metadata.cache.state == UNUSED
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")
    assert compiled().metadata.cache.why == "it is switched off"
    assert not folder.exists()


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
    @I.ir_module
    class Calls:
        I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

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


def test_sources_that_changed_while_they_were_in_use_are_nobodys_key(monkeypatch):
    monkeypatch.setattr("relax_hetero.build.compile_key._IMPORTED", 0.0)
    assert "sources" in compiled().metadata.cache.why
