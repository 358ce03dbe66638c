"""Core affinity of a worker among the other workers of its pool: any topology, any affinity."""

import ctypes

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.artifact.worker_threads import MAX_CPUS
from relax_hetero.driver.link.llvm_kernels import build_llvm
from relax_hetero.driver.link.threads import worker_threads
from relax_hetero.driver.link.threads.worker_threads import llvm_ir
from relax_hetero.tir.core.builder import Function
from relax_hetero.vm.device.workers import core_numbers

TRIPLE = str(tvm.target.codegen.llvm_get_system_triple())


@pytest.fixture(scope="module")
def choose():
    """The CPUs for a worker: the lowest CPU of every CPU's core, the CPUs allowed, those that others are on."""
    if llvm_ir(TRIPLE) is None:
        pytest.skip("no worker threads for this operating system and processor")
    target = tvm.target.Target({"kind": "llvm", "mtriple": TRIPLE, "opt-level": 0})
    with Function("choose") as function:
        T.func_ret(tvm.ir.PrimType("int64"))
        params = [T.arg(f"a{i}", tirx.Var(f"a{i}", "int64")) for i in range(6)]
        pointers = {i: tirx.reinterpret("handle", params[i]) for i in (0, 2, 3, 5)}
        args = [pointers.get(i, param) for i, param in enumerate(params)]
        T.evaluate(tirx.call_extern("void", "relax_hetero_workers_choose", *args))
        T.add_to_parent(tirx.stmt.Return(tirx.const(0, "int64")))
    module = worker_threads._module(target)
    module[tvm.ir.GlobalVar("choose")] = function.result.with_attr("target", target)
    compiled = build_llvm(target, module).get_function("choose")

    def run(cores, allowed, others):
        table, near = (ctypes.c_int32 * max(1, len(cores)))(*cores), (ctypes.c_int64 * max(1, len(others)))(*others)
        given_, chosen = (ctypes.c_uint8 * 128)(), (ctypes.c_uint8 * 128)(*[255] * 128)
        for cpu in allowed:
            given_[cpu // 8] |= 1 << cpu % 8
        address = ctypes.addressof
        compiled(address(table), len(cores), address(given_), address(near), len(others), address(chosen))
        return {cpu for cpu in range(MAX_CPUS) if chosen[cpu // 8] >> cpu % 8 & 1}

    return run


@st.composite
def machines(draw):
    count = draw(st.integers(1, 40))
    threads = draw(st.sampled_from([1, 2, 4]))
    # Neighbours, or as Linux numbers the second threads of cores: after all first ones.
    stride = draw(st.booleans())
    width = -(-count // threads)
    core = [cpu % width if stride else cpu // threads for cpu in range(count)]
    lowest = [core.index(c) for c in core]
    allowed = draw(st.sets(st.integers(0, count - 1), min_size=1))
    others = draw(st.lists(st.one_of(st.integers(0, count - 1), st.just(-1), st.just(5000)), max_size=count + 3))
    return lowest, allowed, others


@given(machines())
def test_a_worker_gets_cores_without_other_workers(choose, machine):
    cores, allowed, others = machine
    here = [cpu for cpu in others if 0 <= cpu < len(cores)]
    occupied = {cores[cpu] for cpu in here}
    free = {cpu for cpu in allowed if cores[cpu] not in occupied}
    assert choose(cores, allowed, others) == (free or allowed - set(here) or allowed)


def test_cpus_of_unknown_cores_are_left_to_the_system(choose):
    # A process that may use a CPU beyond the table alone.
    assert choose([0, 1], {900}, [0]) == {900}
    assert choose([], {3}, []) == {3}


@given(machines())
def test_every_cpu_has_the_lowest_of_its_core(machine):
    lowest, allowed, _ = machine
    by_core = {}
    for cpu in sorted(allowed):
        by_core.setdefault(lowest[cpu], []).append(cpu)
    numbers = core_numbers(list(by_core.values()))
    assert len(numbers) == max(allowed) + 1
    for cpus in by_core.values():
        assert {numbers[cpu] for cpu in cpus} == {min(cpus)}
    assert all(numbers[cpu] == cpu for cpu in range(len(numbers)) if cpu not in allowed)


def test_cpus_of_high_numbers_have_no_entry():
    assert core_numbers([[0, MAX_CPUS + 5], [3]]) == [0, 1, 2, 3, *range(4, MAX_CPUS)]
    assert core_numbers([]) == []
