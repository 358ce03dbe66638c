"""Modules that get worker threads: those with parallel loops, on systems and kernels that support them."""

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from relax_hetero.artifact.worker_threads import launch_setter
from relax_hetero.driver.link.threads.worker_threads import llvm_ir, with_launch_setters, worker_threads
from relax_hetero.vm.device.pinned_staging import loop_of

CPU = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v3"})


def part(parallel, target=CPU, barrier=False):
    @T.prim_func(s_tir=True)
    def loop(y: T.Buffer((8,), "float32")):
        for i in T.parallel(8):
            y[i] = T.float32(1)

    @T.prim_func(s_tir=True)
    def plain(y: T.Buffer((8,), "float32")):
        y[0] = T.float32(1)

    func = loop if parallel else plain
    if barrier:
        attribute = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_parallel_barrier_when_finish", 1, func.body)
        func = func.with_body(attribute)
    return target, tvm.IRModule({"f": func.with_attr("target", target)})


def setters(parts):
    names = [gv.name_hint for _, mod in with_launch_setters(parts) for gv in mod.get_global_vars()]
    return sorted(name for name in names if name != "f")


def test_only_modules_with_parallel_loops_get_a_setter():
    assert setters([part(False), part(True), part(False), part(True)]) == [launch_setter(0), launch_setter(1)]
    assert setters([part(False)]) == []


@pytest.mark.parametrize("system", ["x86_64-apple-darwin", "x86_64-pc-windows-msvc", "riscv64-unknown-linux-gnu"])
def test_other_systems_and_processors_keep_tvms_threads(system):
    assert llvm_ir(system) is None
    target = tvm.target.Target({"kind": "llvm", "mtriple": system})
    assert setters([part(True), part(True, target)]) == []


def test_a_kernel_that_waits_for_all_threads_keeps_tvms_for_its_module():
    assert setters([part(True), part(True, barrier=True)]) == []


def test_an_arm_processor_has_threads_too():
    arm = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    (code,) = worker_threads(with_launch_setters([part(True, arm)]), arm)
    assert "\tyield\n" in code.inspect_source("asm")


def test_code_of_gpus_brings_the_loop_of_copies_along():
    gpu = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    (code,) = worker_threads([(gpu, tvm.IRModule())], CPU)
    assert loop_of(code) is not None
    assert worker_threads([part(False)], CPU) == []
    assert (
        worker_threads([(gpu, tvm.IRModule())], tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-apple-darwin"}))
        == []
    )


def test_code_of_before_leaves_copies_to_the_driver():
    assert loop_of(tvm.compile(part(True)[1], target=CPU).mod) is None
