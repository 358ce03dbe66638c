"""Command buffers by hand on a GPU, without one: the driver's calls work on memory of the host."""

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

from relax_hetero.artifact.commands import GRAPH, KernelSpec, ScalarParam, TensorParam
from relax_hetero.errors import BindingError
from relax_hetero.vm.command_buffer import cuda_runner
from relax_hetero.vm.command_buffer.binding_table import bind
from relax_hetero.vm.command_buffer.cuda_runner import CudaCommands
from relax_hetero.vm.command_buffer.operands import MemoryRange, Number, parameter_name
from relax_hetero.vm.command_buffer.recorder import Recorder, dispatch_arguments
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.region.walk_commands import Kernel

GPU = tvm.cpu(0)


class Library:
    """The driver's functions; while a stream is captured, what it is given is kept and not done.

    Graphs are lists of calls.
    """

    def __init__(self):
        self.calls, self.captured, self.is_lazy = [], None, False
        self.graphs, self.launches, self.fails = {}, 0, False

    def use(self, gpu):
        assert gpu == 0

    def create(self, name, *args):
        return args[0] if name == "cuGraphInstantiateWithFlags" else len(self.calls) + 1

    def error(self, name, status):
        return CudaError(f"{name} failed: {status}")

    def status(self, name, *args, quick=True):
        if name == "cuStreamEndCapture":
            args[1]._obj.value = len(self.graphs) + 1
            self.graphs[len(self.graphs) + 1], self.captured = self.captured, None
            return 901 if self.fails else 0
        return 600 if self.is_lazy and name == "cuEventQuery" else 0

    def call(self, name, *args):
        if name == "cuStreamBeginCapture_v2":
            self.captured = []
        elif name == "cuGraphExecDestroy":
            self.graphs[args[0]] = None
        elif name == "cuGraphLaunch":
            self.launches += 1
            for each, values in self.graphs[args[0]]:
                self.call(each, *values)
        elif self.captured is not None and name != "cuStreamSynchronize":
            self.captured.append((name, args))
            return
        self.calls.append(name)
        if name in ("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
            ctypes.memmove(*args[:3])
        elif name == "cuMemsetD2D32Async":
            address, pitch, value, width, height, _ = args
            assert width == 1
            for row in range(height):
                ctypes.c_uint32.from_address(address + row * pitch).value = value
        elif name.startswith("cuMemset"):
            kind = {"8": ctypes.c_uint8, "16": ctypes.c_uint16, "32": ctypes.c_uint32}[name[9:-5]]
            address, value, count, _ = args
            (kind * count).from_address(address)[:] = [value] * count
        elif name == "launch":
            args[0](*args[1:])

    quick = call


def floats(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def scale(a, b, n, factor):
    floats(b, n)[:] = floats(a, n) * factor


def count_positive(a, count):
    ctypes.c_int32.from_address(count).value = int((floats(a, 8) > 0).sum())


def mark(a, x, y):
    floats(a, 8)[x + 4 * y] += 1


KERNELS = {
    "scale": (scale, ("n", "n"), (ScalarParam("n", "int64"), ScalarParam("factor", "float32")), 0),
    "count_positive": (count_positive, (8, 1), (), 0),
    "mark": (mark, (8,), (ScalarParam("x", "int32"), ScalarParam("y", "int32")), 2),
}


class Bench:
    """A recorder, and kernels whose launches the library sees."""

    def __init__(self, slots=2, parameters=0):
        self.library = Library()
        self.recorder = Recorder(0, slots, parameters, frozenset())

    def slot(self, index, offset=0, length=None):
        return MemoryRange(self, "slot", index, offset, length)

    def kernel(self, name):
        function, extents, scalars, workgroups = KERNELS[name]
        access = [*["read"] * (len(extents) - 1), "write"]
        dtypes = ["int32" if name == "count_positive" and i else "float32" for i in range(len(extents))]
        tensors = tuple(TensorParam(f"t{i}", *each) for i, each in enumerate(self._tensors(dtypes, extents, access)))
        spec = KernelSpec(name, 0, tensors, scalars, workgroups, (), name)

        def launch(*args):
            plain = [arg.value if isinstance(arg, ctypes.c_void_p) else arg for arg in args]
            self.library.call("launch", function, *plain)

        return Kernel(spec, 0, SimpleNamespace(get_function=lambda *_: launch))

    @staticmethod
    def _tensors(dtypes, extents, access):
        return [(d, (e,), 4, a) for d, e, a in zip(dtypes, extents, access, strict=True)]

    def dispatch(self, name, operands, scalars=(), grid=(1,), count=None, when=None, unless=None):
        self.recorder.dispatch(dispatch_arguments(self.kernel(name), operands, scalars), grid, count, when, unless)

    def commands(self):
        self.recording = self.recorder.finish()
        return CudaCommands(GPU, self.recording, self.library)

    def table(self, *arrays):
        return bind(self.recording, list(arrays), GPU, "cuda:0")


def test_commands_in_order():
    bench = Bench(3, 1)
    x, y, n = bench.slot(0), bench.slot(1), Number(parameter_name(0))
    bench.dispatch("scale", [x, y], {"n": n, "factor": 2.5})
    bench.recorder.barrier()
    bench.recorder.copy(bench.slot(1, 0, 8), bench.slot(2, 8, 8))
    for offset, pattern in ((16, b"\x07"), (20, b"\x01\x02"), (24, b"\x01\x02\x03\x04")):
        bench.recorder.fill(bench.slot(2, offset, 4), pattern)
    bench.recorder.fill(bench.slot(2, 32, 16), bytes(range(8)))
    commands = bench.commands()
    assert commands.runs == GRAPH
    for count in (4, 2, 4, 4):
        x, y, z = np.arange(1, 5, dtype="float32"), np.zeros(4, "float32"), np.zeros(12, "float32")
        work = commands.submit(bench.table(x, y, z), (count,))
        assert work.done() is True
        work.wait()
        expected = np.where(np.arange(4) < count, x * 2.5, 0)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(z[2:4], expected[:2])
        filled = b"\x07" * 4 + b"\x01\x02" * 2 + b"\x01\x02\x03\x04" + bytes(4) + bytes(range(8)) * 2
        assert z.tobytes()[16:] == filled


def test_a_table_that_comes_again_is_a_graph():
    bench = Bench()
    bench.dispatch("scale", [bench.slot(0), bench.slot(1)], (4, 2.0))
    commands = bench.commands()
    x, y = np.zeros(4, "float32"), np.zeros(4, "float32")
    table = bench.table(x, y)
    for iteration in range(5):
        x[:] = iteration
        commands.submit(table, ())
        np.testing.assert_array_equal(y, 2.0 * iteration + np.zeros(4))
    assert (len(bench.library.graphs), bench.library.launches) == (1, 4)
    commands.submit(bench.table(x, y), ())  # another table, which may be gone when it is over
    assert (len(bench.library.graphs), bench.library.launches) == (1, 4)
    del commands
    gc.collect()
    assert bench.library.graphs == {1: None}


def test_graphs_that_were_not_used_are_given_back(monkeypatch):
    monkeypatch.setattr(cuda_runner, "MAX_GRAPHS", 2)
    bench = Bench(2, 1)
    bench.dispatch("scale", [bench.slot(0), bench.slot(1)], {"n": Number(parameter_name(0)), "factor": 1.0})
    commands = bench.commands()
    table = bench.table(np.zeros(4, "float32"), np.zeros(4, "float32"))
    for count in (1, 1, 2, 2, 3, 3):
        commands.submit(table, (count,))
    assert [number for number, calls in bench.library.graphs.items() if calls] == [2, 3]


def test_submissions_that_cannot_be_recorded_are_launched(caplog):
    bench = Bench()
    bench.library.fails = True
    bench.dispatch("scale", [bench.slot(0), bench.slot(1)], (4, 2.0))
    commands = bench.commands()
    x, y = np.ones(4, "float32"), np.zeros(4, "float32")
    table = bench.table(x, y)
    for _ in range(3):
        y[:] = 0
        commands.submit(table, ())
        np.testing.assert_array_equal(y, 2.0 * x)
    assert commands.runs == "stream"
    (record,) = caplog.records
    assert "cuStreamEndCapture failed" in record.message


def test_counts_and_predicates_in_memory():
    bench = Bench(3)
    x, count, marks = (bench.slot(i) for i in range(3))
    bench.dispatch("count_positive", [x, count])
    bench.dispatch("mark", [marks], count=count)
    bench.dispatch("mark", [bench.slot(2)], grid=(1, 2), when=count)
    bench.dispatch("mark", [bench.slot(2)], grid=(3,), unless=count)
    commands = bench.commands()
    assert commands.runs == "stream"
    for positive in (0, 3, 0, 2):
        values = np.where(np.arange(8) < positive, 1, -1).astype("float32")
        marks, table = np.zeros(8, "float32"), None
        table = bench.table(values, np.zeros(1, "int32"), marks)
        for iteration in (1, 2):
            commands.submit(table, ())
            expected = np.zeros(8)
            expected[:positive] += 1
            expected[[0, 4] if positive else [0, 1, 2]] += 1
            np.testing.assert_array_equal(marks, expected * iteration)


def test_work_keeps_its_memory_until_it_has_ended():
    bench = Bench()
    bench.dispatch("scale", [bench.slot(0), bench.slot(1)], (4, 2.0))
    commands = bench.commands()
    bench.library.is_lazy = True
    table = bench.table(np.zeros(4, "float32"), np.zeros(4, "float32"))
    assert commands.submit(table, ()).done() is False
    assert [work._table for work in commands._running] == [table]
    bench.library.is_lazy = False
    other = bench.table(np.zeros(4, "float32"), np.zeros(4, "float32"))
    commands.submit(other, ())
    assert [work._table for work in commands._running] == [other]


def test_memory_of_another_device_is_refused():
    bench = Bench()
    bench.dispatch("scale", [bench.slot(0), bench.slot(1)], (4, 2.0))
    bench.commands()
    with pytest.raises(BindingError, match="expected cuda:0"):
        bind(bench.recording, [np.zeros(4, "float32")] * 2, tvm.cuda(0), "cuda:0")
