"""One command buffer submitted many times, by several threads at once, with ever other tables."""

import gc
import resource
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from vm.command_kernels import Kernels, floats


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Kernels))


def chain(vm, compiled=True):
    """(slot 0 + 1) * parameter 0 into slot 1, by way of slot 2."""
    cb = rh.vm.CommandBuffer(vm, slots=3, parameters=1)
    cb.begin()
    cb.dispatch("shift", 1, [cb.slot(0), cb.slot(2)])
    cb.barrier()
    cb.dispatch("scale", 1, [cb.slot(2), cb.slot(1)], {"n": 16, "factor": cb.parameter(0)})
    cb.end(compiled)
    return cb


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "walked"])
def test_three_submissions_in_flight(vm, compiled):
    cb, start = chain(vm, compiled), threading.Barrier(3)
    wrong = []

    def submit(seed):
        start.wait()
        for round_ in range(300):
            x, y, z = floats(16, 1000 * seed + round_), np.zeros(16, "float32"), np.zeros(16, "float32")
            cb.submit([x, y, z], [seed + 0.5]).wait()
            if not np.array_equal(y, (x + 1) * np.float32(seed + 0.5)):
                wrong.append((seed, round_))

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_one_shot_buffer_given_by_two_threads_runs_once(vm):
    for _ in range(20):
        cb = rh.vm.CommandBuffer(vm, slots=1, mode="one-shot")
        cb.begin()
        cb.dispatch("mark", (1, 1, 1), [cb.slot(0)])
        cb.end(compiled=False)
        marks, start, refused = np.zeros((4, 3, 2), "int32"), threading.Barrier(2), []

        def submit(cb=cb, marks=marks, start=start, refused=refused):
            start.wait()
            try:
                cb.submit([marks])
            except rh.HeteroError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 1
        assert marks[0, 0, 0] == 1


@pytest.mark.slow
def test_four_thousand_submissions_hold_no_memory(vm):
    cb = chain(vm)

    def submit(times):
        for number in range(times):
            x = np.full(16 + 4096, number, "float32")
            y, z = np.empty(16 + number % 7, "float32"), np.empty(16, "float32")
            cb.submit(cb.bind([x, y, z]), [0.5])
            assert y[0] == (number + 1) * 0.5

    submit(1000)
    gc.collect()
    tracemalloc.start()
    used = tracemalloc.get_traced_memory()[0]
    submit(4000)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - used
    tracemalloc.stop()
    assert used < 20_000, f"{used} bytes are held after 4,000 submissions"


def test_no_array_outlives_the_table_that_held_it(vm):
    cb, alive = chain(vm), weakref.WeakSet()

    class Memory(np.ndarray):
        """NumPy's own arrays cannot be members of a set, not even of a weak one."""

        __hash__ = object.__hash__
        __eq__ = object.__eq__

    for number in range(300):
        x, y, z = (np.full(16 + 4096, number, "float32").view(Memory) for _ in range(3))
        alive.update((x, y, z))
        cb.submit(cb.bind([x, y[: 16 + number % 7], z[:16]]), [0.5])
        del x, y, z
        assert not alive


@pytest.mark.timing
def test_twelve_thousand_submissions_take_no_memory(vm):
    cb = chain(vm)

    def submit(times):
        for number in range(times):
            x = np.full(16 + 4096, number, "float32")
            cb.submit(cb.bind([x, np.empty(16 + number % 7, "float32"), np.empty(16, "float32")]), [0.5])

    submit(2000)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    submit(10000)
    # A table that stayed alive would keep 16 KB: 160 MB of them.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10


def test_a_table_frees_its_bindings(vm):
    cb, freed = chain(vm), threading.Event()

    class Memory(np.ndarray):
        def __del__(self):
            freed.set()

    table = cb.bind([np.zeros(16, "float32").view(Memory), np.zeros(16, "float32"), np.zeros(16, "float32")])
    gc.collect()
    assert not freed.is_set()
    cb.submit(table, [1])
    del table
    gc.collect()
    assert freed.is_set()


@ir_module("llvm")
class Model:
    """A region of two kernels that are the model's own."""

    @T.prim_func(private=True, s_tir=True)
    def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(8):
            with T.sblock("double"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[vi] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def turn(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(8):
            with T.sblock("turn"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[7 - vi]

    @R.function
    def main(x: R.Tensor((8,), "float32", "llvm:0")):
        cls = Model
        with R.dataflow():
            y = R.call_tir(cls.double, (x,), out_ty=R.Tensor((8,), "float32", "llvm:0"))
            z = R.call_tir(cls.turn, (y,), out_ty=R.Tensor((8,), "float32", "llvm:0"))
            R.output(z)
        return z


def test_kernels_of_a_models_regions():
    exe = rh.compile(Model)
    assert {kernel for region in exe.metadata.regions for kernel in region.kernels} == {"double", "turn"}
    machine = rh.vm.VirtualMachine(exe)
    cb = rh.vm.CommandBuffer(machine, slots=2)
    cb.begin()
    between = cb.buffer(np.zeros(8, "float32"))
    cb.dispatch("double", 1, [cb.slot(0), between])
    cb.dispatch("turn", 1, [between, cb.slot(1)])
    cb.end()
    x = floats(8, 5)
    cb.submit([x, out := np.zeros(8, "float32")])
    np.testing.assert_array_equal(out, machine["main"](x).numpy())
