"""Modules of a few kernels compiled in parallel: in order, with the caller's settings, with the error of the first."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_walk

import relax_hetero as rh
from relax_hetero.driver.link import parallel_codegen
from relax_hetero.driver.link.parallel_codegen import KERNELS_PER_MODULE, build_in_parallel, compact_blocks, cut
from seeds import fresh_rng

LLVM = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(parallel_codegen, "num_cores", lambda: 2)


@T.prim_func
def scale(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    for i in range(4):
        b[i] = a[i] * T.float32(3)


@T.prim_func
def calls_kernel_3(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    T.evaluate(T.call_extern("int32", "kernel_3", a.data, b.data))


@T.prim_func(s_tir=True)
def scale_by_rows(a: T.Buffer((4, 8), "float32"), b: T.Buffer((4, 8), "float32")):
    rows = T.sblock_alloc_buffer((4, 8))
    for i in range(4):
        for j in range(8):
            with T.sblock("scaled"):
                row, column = T.axis.remap("SS", [i, j])
                rows[row, column] = a[row, column] * T.float32(3)
        for j in range(8):
            with T.sblock("shifted"):
                row, column = T.axis.remap("SS", [i, j])
                b[row, column] = rows[row, column] + T.float32(1)


def _kernels(count: int) -> tvm.IRModule:
    return tvm.IRModule({f"kernel_{i}": scale.with_attr("global_symbol", f"kernel_{i}") for i in range(count)})


def _names(parts: list[tvm.IRModule]) -> list[list[str]]:
    return [sorted(gv.name_hint for gv in part.get_global_vars()) for part in parts]


def test_every_kernel_is_in_one_part():
    parts = _names(cut(LLVM, _kernels(2 * KERNELS_PER_MODULE + 1)))
    assert len(parts) == 3
    assert max(map(len, parts)) <= KERNELS_PER_MODULE
    assert sorted(sum(parts, [])) == sorted(f"kernel_{i}" for i in range(2 * KERNELS_PER_MODULE + 1))


def test_dependent_functions_stay_in_one_part():
    many = 3 * KERNELS_PER_MODULE
    assert len(cut(tvm.target.Target("c"), _kernels(many))) == 1
    calling = _kernels(many)
    calling["caller"] = calls_kernel_3.with_attr("global_symbol", "caller")
    assert len(cut(LLVM, calling)) == 1
    calling["caller"] = scale.with_attr("global_symbol", "caller")
    assert len(cut(LLVM, calling)) > 1


def _without_instruments(part: tvm.IRModule) -> tvm.IRModule:
    return build_in_parallel([(LLVM, part)], lambda _, part: tvm.tirx.get_default_tir_pipeline(LLVM)[0](part))[0]


def test_a_temporary_of_a_block_is_reduced_to_a_row_as_by_the_whole_pipeline(two_cores):
    kernels = tvm.IRModule({"rows": scale_by_rows.with_attr("global_symbol", "rows"), "scale": scale})
    compact = compact_blocks(kernels)
    assert compact["scale"].same_as(kernels["scale"])
    bound = tvm.tirx.transform.BindTarget(LLVM.with_host(LLVM))(kernels)
    lowered = _without_instruments(bound)
    assert lowered.script() == tvm.tirx.get_default_tir_pipeline(LLVM)[0](bound).script()
    assert [[int(extent) for extent in alloc.buffer.shape] for alloc in _allocations(lowered["rows"])] == [[8]]


def _allocations(func: tvm.tirx.PrimFunc) -> list[tvm.tirx.AllocBuffer]:
    found: list[tvm.tirx.AllocBuffer] = []
    structural_walk(func.body, (tvm.tirx.AllocBuffer, found.append))
    return found


def test_results_stand_in_order_and_settings_reach_every_thread(two_cores):
    settings: list[tuple[str, bool]] = []
    met = threading.Barrier(2, timeout=30)  # two parts are in work at once

    def build(target, part):
        met.wait()
        config = tvm.transform.PassContext.current().config
        settings.append((threading.current_thread().name, bool(config["tirx.disable_assert"])))
        return part

    parts = [(LLVM, _kernels(i + 1)) for i in range(6)]
    progress: list[tuple[str, int, int]] = []
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        results = build_in_parallel(parts, build, lambda *step: progress.append(step))
    assert all(result.same_as(part) for result, (_, part) in zip(results, parts, strict=True))
    assert all(asserted for _, asserted in settings)
    assert len({name for name, _ in settings}) == 2
    counts = [done for _, done, _ in progress]
    assert counts == sorted(set(counts)) and len(counts) == 6
    assert progress[-1] == ("kernels", 21, 21)


def test_instruments_are_asked_in_the_callers_thread(two_cores):
    @tvm.instrument.pass_instrument
    class Nothing:
        pass

    def build(target, part):
        assert threading.current_thread() is threading.main_thread()
        return part

    with tvm.transform.PassContext(instruments=[Nothing()]):
        assert len(build_in_parallel([(LLVM, _kernels(1))] * 3, build)) == 3


def test_the_first_part_that_fails_is_named(two_cores):
    def build(target, part):
        name = part.get_global_vars()[0].name_hint
        if name in ("kernel_1", "kernel_3"):
            raise ValueError(name)
        return part

    parts = [(LLVM, tvm.IRModule({name: scale})) for name in ("kernel_0", "kernel_1", "kernel_2", "kernel_3")]
    with pytest.raises(ValueError, match="kernel_1"):
        build_in_parallel(parts, build)


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((3, 40), "float32")):
        with R.dataflow():
            a = R.nn.softmax(x, axis=-1)
            b = R.sum(a, axis=0)
            c = R.cumsum(b, axis=0)
            d = R.sort(c, axis=-1)
            e = R.repeat(d, 2, axis=0)
            f = R.flip(e, axis=0)
            g = R.max(R.reshape(f, (8, 10)), axis=0)
            h = R.tile(g, (2, 2))
            R.output(h)
        return h


def test_an_executable_of_several_modules(two_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_codegen, "KERNELS_PER_MODULE", 1)
    exe = rh.compile(Chain)
    assert len(exe.module.imports) > 2
    x = fresh_rng().normal(size=(3, 40)).astype("float32")
    actual = rh.vm.VirtualMachine(exe)["main"](x).numpy()
    files = [tmp_path / "first.so", tmp_path / "second.so"]
    exe.export_library(str(files[0]))
    loaded = rh.vm.VirtualMachine(rh.load(str(files[0])))["main"](x).numpy()
    np.testing.assert_array_equal(actual, loaded)
    rh.compile(Chain).export_library(str(files[1]))
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setattr(parallel_codegen, "KERNELS_PER_MODULE", 1000)
    np.testing.assert_array_equal(actual, rh.vm.VirtualMachine(rh.compile(Chain))["main"](x).numpy())


def test_compiling_tells_of_its_progress(two_cores, monkeypatch):
    monkeypatch.setattr(parallel_codegen, "KERNELS_PER_MODULE", 2)
    progress: list[tuple[str, int, int]] = []
    rh.compile(Chain, progress=lambda *step: progress.append(step))
    passes = [(done, total) for name, done, total in progress if name == "passes"]
    assert passes == [(i + 1, len(passes)) for i in range(len(passes))]
    kernels = [(done, total) for name, done, total in progress if name == "kernels"]
    assert len(kernels) > 1 and kernels == sorted(set(kernels)) and kernels[-1][0] == kernels[-1][1]
    assert [name for name, _, _ in progress] == sorted((name for name, _, _ in progress), reverse=True)


def test_an_error_of_the_progress_callback_propagates():
    def progress(step, done, total):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        rh.compile(Chain, progress=progress)
