"""Command buffers as CUDA graphs on NVIDIA GPUs, against numpy; bindings, memory, runs without a graph."""

import gc

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te
from tvm.script import tirx as T

import relax_hetero as rh
from gpu.allocations import allocations
from modules import ir_module
from relax_hetero.artifact.graph_layout import RING_ROWS
from relax_hetero.driver.link.cuda import kernel_sources
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.vm.region import cuda_graph
from seeds import fresh_rng

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CUDA = {"kind": "cuda", "arch": "sm_90"}
OPAQUE = 8


def steps(count, extent=16, symbolic=False):
    """`count` kernels that nothing fuses, each of which adds its number; exact for small whole numbers."""
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64") if symbolic else tvm.tirx.const(extent, "int64")

    def kernel(number):
        size = te.var("n", "int64") if symbolic else n
        x = te.placeholder((size,), "float32", "x")
        y = te.compute((size,), lambda i: x[i] + tvm.tirx.const(number + 1, "float32"), "y")
        return te.create_prim_func([x, y]).with_attr({"op_pattern": OPAQUE})

    kernels = [builder.add_func(kernel(number), f"step_{number}") for number in range(min(count, 3))]
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for number in range(count):
                value = builder.emit(relax.op.call_tir(kernels[number % 3], [value], x.ty))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return with_vdevices(builder.get(), [rh.VDevice(CUDA)])


def added(x, count):
    return x + sum(number % 3 + 1 for number in range(count))


def numbers(extent=16):
    return fresh_rng().integers(-1000, 1000, extent).astype("float32")


def layers(count=3, rows=8, devices=None, at=None):
    """Products by constants and softmax: kernels with shared memory, an arena, constants."""
    devices = devices or [rh.VDevice(CUDA)]
    weights = [fresh_rng().standard_normal((64, 64)).astype("float32") for _ in range(count)]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 64), "float32", devices[0]))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for index, weight in enumerate(weights):
                if at and index:
                    value = builder.emit(relax.op.to_vdevice(value, devices[at[index]]))
                value = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(value, relax.const(weight)))))
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", devices)
    return mod, weights


def layered(x, weights):
    x = x.astype("float64")
    for weight in weights:
        logits = x @ weight
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        x = exps / exps.sum(-1, keepdims=True)
    return x


def graph_of(vm):
    (graph,) = vm.graphs
    return graph


def is_recorded(graph):
    return graph._words[2] != 0


def test_layers_as_a_graph():
    mod, weights = layers()
    exe = rh.compile(mod)
    assert [region.runs for region in exe.metadata.regions] == ["CUDA graph"]
    vm = rh.vm.VirtualMachine(exe)
    plain = rh.vm.VirtualMachine(rh.compile(mod, command_buffers=False))
    for _ in range(5):
        x = fresh_rng().standard_normal((8, 64)).astype("float32")
        out = vm["main"](x).numpy()
        np.testing.assert_allclose(out, layered(x, weights), rtol=1e-4)
        np.testing.assert_array_equal(out, plain["main"](x).numpy())
    assert is_recorded(graph_of(vm))


@pytest.mark.parametrize("count, extent", [(2, 16), (3, 16), (10, 5000), (200, 16), (200, 1030)])
def test_other_bindings_each_time(count, extent):
    vm = rh.vm.VirtualMachine(rh.compile(steps(count, extent)))
    results = []  # so that no result has the memory of an earlier one
    for _ in range(3 * RING_ROWS):
        x = numbers(extent)
        results.append((x, vm["main"](tvm.runtime.tensor(x, tvm.cuda(0)))))
    for x, y in results:
        np.testing.assert_array_equal(y.numpy(), added(x, count))
    assert is_recorded(graph_of(vm))


def test_many_submissions_in_flight():
    """More than there are rows, with nothing waited for in between."""
    vm = rh.vm.VirtualMachine(rh.compile(steps(200)))
    graph, device = graph_of(vm), tvm.cuda(0)
    vm["main"](numbers())
    xs = [numbers() for _ in range(6 * RING_ROWS)]
    inputs = [tvm.runtime.tensor(x, device) for x in xs]
    results = [tvm.runtime.tensor(np.full(16, np.nan, "float32"), device) for _ in xs]
    device.sync()
    for x, y in zip(inputs, results, strict=True):
        graph.submit_function(x, graph.state, y)
    for x, y in zip(xs, results, strict=True):
        np.testing.assert_array_equal(y.numpy(), added(x, 200))


def test_results_that_are_read_are_not_overwritten_by_later_calls():
    vm = rh.vm.VirtualMachine(rh.compile(steps(4)))
    xs = [numbers() for _ in range(3)]
    ys = [vm["main"](x) for x in xs]
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(y.numpy(), added(x, 4))


def test_a_stream_of_the_callers():
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(rh.compile(steps(5)))
    x = torch.zeros(16, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream), tvm_ffi.use_raw_stream(tvm.cuda(0), stream.cuda_stream):
            x.add_(1.0)
            y = torch.from_dlpack(vm["main"](x)) * 2.0
        stream.synchronize()
        assert torch.equal(y, (x + 9.0) * 2.0)


def test_ten_thousand_submissions_leave_nothing():
    vm = rh.vm.VirtualMachine(rh.compile(steps(20)))
    x = tvm.runtime.tensor(numbers(), tvm.cuda(0))
    vm["main"](x)
    for _ in range(100):
        vm["main"](x)
    with allocations() as counts:
        for _ in range(10_000):
            y = vm["main"](x)
    np.testing.assert_array_equal(y.numpy(), added(x.numpy(), 20))
    assert not +counts


def test_machines_come_and_go():
    exe = rh.compile(steps(50))

    def once():
        x = numbers()
        np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](x).numpy(), added(x, 50))
        gc.collect()

    for _ in range(3):
        once()
    with allocations() as counts:
        for _ in range(20):
            once()
    assert not +counts
    assert not cuda_graph._graphs


def test_two_machines_share_a_device():
    mod, weights = layers()
    exe = rh.compile(mod)
    machines = [rh.vm.VirtualMachine(exe) for _ in range(2)]
    for _ in range(4):
        xs = [fresh_rng().standard_normal((8, 64)).astype("float32") for _ in machines]
        ys = [vm["main"](x) for vm, x in zip(machines, xs, strict=True)]
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_allclose(y.numpy(), layered(x, weights), rtol=1e-4)


def test_symbolic_extents():
    exe = rh.compile(steps(6, symbolic=True))
    assert [region.runs for region in exe.metadata.regions] == ["CUDA graph"]
    vm = rh.vm.VirtualMachine(exe)
    for _ in range(4):
        for extent in (1, 7, 1000, 3, 4096):
            x = numbers(extent)
            np.testing.assert_array_equal(vm["main"](x).numpy(), added(x, 6))
    assert len(graph_of(vm)._captured) == 5


def test_symbolic_layers():
    """An arena whose size follows the rows, constants, and kernels of products and rows."""
    mod, weights = layers(rows=tvm.tirx.Var("n", "int64"))
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    results = []
    for _ in range(3):
        for rows in (8, 1, 300, 65):
            x = fresh_rng().standard_normal((rows, 64)).astype("float32")
            results.append((x, vm["main"](tvm.runtime.tensor(x, tvm.cuda(0)))))
    for x, y in results:
        np.testing.assert_allclose(y.numpy(), layered(x, weights), rtol=1e-4)
    assert len(graph_of(vm)._captured) == 4


@pytest.mark.parametrize("symbolic", [False, True])
def test_donated_arguments(symbolic):
    rows = tvm.tirx.Var("n", "int64") if symbolic else 64
    x, y = (relax.Var(name, relax.TensorType((rows, 64), "float32")) for name in "xy")
    builder, weight = relax.BlockBuilder(), fresh_rng().standard_normal((64, 64)).astype("float32")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            a = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(y, relax.const(weight)))))
            total = builder.emit(relax.op.add(x, builder.emit(relax.op.matmul(a, relax.const(weight)))))
            out = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.matmul(total, relax.const(weight)))))
            total = builder.emit_output(total)
        builder.emit_func_output(relax.Tuple([total, out]))
    exe = rh.compile(with_vdevices(builder.get(), [rh.VDevice(CUDA)]), donate=["x"])
    vm = rh.vm.VirtualMachine(exe)

    def softmax(logits):
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        return exps / exps.sum(-1, keepdims=True)

    for _ in range(4):
        x, y = fresh_rng().standard_normal((2, 64, 64)).astype("float32")
        actual = [f.numpy() for f in vm["main"](tvm.runtime.tensor(x, tvm.cuda(0)), y)]
        expected = x + softmax(y.astype("float64") @ weight) @ weight
        np.testing.assert_allclose(actual[0], expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(actual[1], softmax(expected @ weight), rtol=1e-3, atol=1e-4)


def by_hand():
    """A machine with kernels that command buffers by hand may run on the GPU."""

    @ir_module({"kind": "cuda", "arch": "sm_90"})
    class Kernels:
        @T.prim_func(s_tir=True)
        def scale(a: T.handle, b: T.handle, factor: T.float32):
            n = T.int64()
            A = T.match_buffer(a, (n,), "float32")
            B = T.match_buffer(b, (n,), "float32")
            for i in range(n):
                with T.sblock("scale"):
                    vi = T.axis.spatial(n, i)
                    B[vi] = A[vi] * factor

        @T.prim_func(s_tir=True)
        def count_positive(A: T.Buffer((8,), "float32"), counts: T.Buffer((1,), "int32")):
            with T.sblock("root"):
                T.reads()
                T.writes()
                counts[0] = T.int32(0)
                for i in range(8):
                    if A[i] > T.float32(0):
                        counts[0] = counts[0] + T.int32(1)

        @T.prim_func(s_tir=True)
        def mark(A: T.Buffer((8,), "float32"), row: T.int32):
            T.func_attr({"relax_hetero.workgroups": 1})
            with T.sblock("root"):
                T.reads()
                T.writes()
                A[row] = A[row] + T.float32(1)

    return rh.vm.VirtualMachine(rh.compile(Kernels))


def on_gpu(array):
    return tvm.runtime.tensor(array, tvm.cuda(0))


def test_kernels_copies_and_fills_by_hand():
    vm = by_hand()
    cb = rh.vm.CommandBuffer(vm, slots=3, parameters=1)
    cb.begin()
    cb.dispatch("scale", 1, [cb.slot(0), cb.slot(1)], {"n": cb.parameter(0), "factor": 2.5})
    cb.copy(cb.slot(1, 0, 1024), cb.slot(2, 0, 1024))
    cb.fill(cb.slot(2, 1024, 64), 7.0, "float32")
    cb.fill(cb.slot(2, 1088, 64), -1.0, "float64")
    cb.fill(cb.slot(2, 1152, 32), b"\x01\x02")
    cb.end()
    assert cb.spec.runs == "CUDA graph"
    tables = []
    for _ in range(3):
        x = numbers(1000)
        tensors = [on_gpu(a) for a in (x, np.zeros(1000, "float32"), np.zeros(300, "float32"))]
        tables.append((x, tensors, cb.bind(dict(enumerate(tensors)))))
    for _ in range(3):
        for x, (_, y, z), table in tables:
            for count in (1000, 256):
                cb.submit(table, [count]).wait()
                np.testing.assert_array_equal(y.numpy()[:count], x[:count] * np.float32(2.5))
                assert z.numpy()[256:272].tolist() == [7.0] * 16
                assert z.numpy()[272:288].view("float64").tolist() == [-1.0] * 8
                assert z.numpy()[288:296].tobytes() == b"\x01\x02" * 16
                np.testing.assert_array_equal(z.numpy()[:256], y.numpy()[:256])
    with pytest.raises(rh.BindingError, match="cuda:0"):
        cb.bind([np.zeros(1000, "float32")] * 3)


def test_counts_and_predicates_by_hand():
    vm = by_hand()
    cb = rh.vm.CommandBuffer(vm, slots=2)
    count = cb.buffer(on_gpu(np.zeros(1, "int32")))
    cb.begin()
    cb.dispatch("count_positive", 1, [cb.slot(0), count])
    cb.dispatch_indirect("mark", count, [cb.slot(1)])
    cb.dispatch("mark", 1, [cb.slot(1)], when=count)
    cb.dispatch("mark", 3, [cb.slot(1)], unless=count)
    cb.end()
    for positive in (0, 3, 8, 0):
        marks = on_gpu(np.zeros(8, "float32"))
        cb.submit([on_gpu(np.where(np.arange(8) < positive, 1, -1).astype("float32")), marks]).wait()
        expected = np.zeros(8)
        expected[:positive] += 1
        expected[: 1 if positive else 3] += 1
        np.testing.assert_array_equal(marks.numpy(), expected)


def test_host_functions_in_several_modules(tmp_path, monkeypatch):
    """In memory, and linked in a file."""
    monkeypatch.setattr(kernel_sources, "HOST_FUNCTIONS_PER_MODULE", 1)
    executable = rh.compile(steps(7), cache=False)
    executable.export_library(tmp_path / "model.so")
    for each in (executable, rh.load(tmp_path / "model.so")):
        machine, x = rh.vm.VirtualMachine(each), numbers()
        for _ in range(3):
            np.testing.assert_array_equal(machine["main"](x).numpy(), added(x, 7))


def test_export_and_load(tmp_path):
    mod, weights = layers()
    rh.compile(mod).export_library(tmp_path / "model.so")
    vm = rh.vm.VirtualMachine(rh.load(tmp_path / "model.so"))
    for _ in range(3):
        x = fresh_rng().standard_normal((8, 64)).astype("float32")
        np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)
    assert is_recorded(graph_of(vm))


def test_a_file_loaded_again_after_the_first_executable_ended(tmp_path):
    """Host code keeps the kernels it has looked up, which end with their executable."""
    mod, weights = layers()
    rh.compile(mod).export_library(tmp_path / "model.so")
    vm = None
    for _ in range(3):
        vm = rh.vm.VirtualMachine(rh.load(tmp_path / "model.so"))  # the machine before ends here
        gc.collect()
        x = fresh_rng().standard_normal((8, 64)).astype("float32")
        np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)
    assert is_recorded(graph_of(vm))


def test_profile():
    mod, weights = layers()
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    x = fresh_rng().standard_normal((8, 64)).astype("float32")
    for _ in range(2):
        assert any(row.device == "cuda:0" for row in vm.profile("main", x).rows)
        np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)


def test_stock_tvm_builds_and_runs_it():
    mod, weights = layers()
    vm = relax.VirtualMachine(tvm.compile(mod, relax_pipeline=rh.get_pipeline()), [tvm.cuda(0), tvm.cpu(0)])
    x = fresh_rng().standard_normal((8, 64)).astype("float32")
    out = vm["main"](tvm.runtime.tensor(x, tvm.cuda(0)))
    np.testing.assert_allclose(out.numpy(), layered(x, weights), rtol=1e-4)


def test_cpu_and_gpu():
    mod, weights = layers(4, devices=[rh.VDevice(rh.native("llvm")), rh.VDevice(CUDA)], at=[0, 1, 1, 0])
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(3):
        x = fresh_rng().standard_normal((8, 64)).astype("float32")
        np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)
    assert is_recorded(graph_of(vm))


@two_gpus
def test_two_gpus_have_graphs_of_their_own():
    mod, weights = layers(4, devices=[rh.VDevice(CUDA, 0), rh.VDevice(CUDA, 1)], at=[0, 0, 1, 1])
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(4):
        x = fresh_rng().standard_normal((8, 64)).astype("float32")
        np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)
    assert len(vm.graphs) == 2 and all(map(is_recorded, vm.graphs))


@two_gpus
def test_one_executable_on_either_gpu():
    mod, weights = layers()
    exe = rh.compile(mod)
    machines = [rh.vm.VirtualMachine(exe, [tvm.cuda(index)]) for index in (0, 1)]
    for _ in range(3):
        for vm in machines:
            x = fresh_rng().standard_normal((8, 64)).astype("float32")
            np.testing.assert_allclose(vm["main"](x).numpy(), layered(x, weights), rtol=1e-4)
