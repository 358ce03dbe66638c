"""The example of a back end in a package of its own: a simulated accelerator."""

import re
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from models.running import assert_both_devices_hold_ops, assert_same, cut, expected_outputs, outputs_after_export
from models.zoo import inputs_of, minilm, node_names, random_model
from relax_hetero.frontend.auto import measure_devices
from relax_hetero.target import backend
from relax_hetero.target.backend import ENTRY_POINTS, backend_of, register_backend

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "backend_npu"


@I.ir_module
class Bytes:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("ext_dev")]})

    @R.function
    def main(
        x: R.Tensor((40, 33), "int8", "ext_dev:0"), w: R.Tensor((33, 20), "int8"), f: R.Tensor((20, 8), "float32")
    ):
        with R.dataflow():
            sums = R.matmul(x, w, out_dtype="int32")
            positive = R.nn.relu(R.astype(sums, "float32"))
            product = R.to_vdevice(R.matmul(positive, f), "llvm:0")
            R.output(sums, product)
        return sums, product


@I.ir_module
class Sorts:
    I.module_global_infos({"vdevice": [I.vdevice("ext_dev")]})

    @R.function
    def main(x: R.Tensor((7, 300), "float32")):
        with R.dataflow():
            best = R.topk(R.add(x, x), k=30, axis=1, ret_type="values", largest=True)
            second = R.topk(R.negative(best), k=3, axis=1, ret_type="values", largest=True)
            R.output(second)
        return second


@I.ir_module
class Transposed:
    I.module_global_infos({"vdevice": [I.vdevice("ext_dev")]})

    @R.function
    def main(x: R.Tensor((33, 40), "uint8"), w: R.Tensor((20, 33), "int8")):
        with R.dataflow():
            sums = R.matmul(R.permute_dims(x), R.permute_dims(w), out_dtype="int32")
            positive = R.nn.relu(sums)
            R.output(positive)
        return positive


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import backend_npu

    before = backend_of("ext_dev")
    register_backend(backend_npu.NpuBackend())
    backend_npu.counts.clear()
    yield backend_npu
    register_backend(before)


def test_products_of_bytes_on_the_matrix_unit(npu, tmp_path):
    generator = np.random.default_rng(0)
    x, w = (generator.integers(-128, 128, shape).astype("int8") for shape in ((40, 33), (33, 20)))
    f = generator.standard_normal((20, 8)).astype("float32")
    expected = x.astype("int32") @ w.astype("int32")
    executable = rh.compile(Bytes)
    executable.export_library(tmp_path / "model.so")
    for each in (executable, rh.load(tmp_path / "model.so")):
        machine = rh.vm.VirtualMachine(each)
        for sums, product in (machine["main"](x, w, f), machine.submit("main", x, w, f).result()):
            assert (str(sums.device), str(product.device)) == ("ext_dev:0", "cpu:0")
            assert (sums.numpy() == expected).all()
            np.testing.assert_allclose(product.numpy(), np.maximum(expected, 0) @ f, rtol=1e-4, atol=0.1)
    assert npu.counts["steps"] == 4 * 3 * 2 * 3 and npu.counts["copies"] > 4  # of 16 x 16 x 16 bytes, in four calls


def test_transposed_products_with_an_activation_on_the_matrix_unit(npu):
    generator = np.random.default_rng(0)
    x, w = generator.integers(0, 256, (33, 40), "uint8"), generator.integers(-128, 128, (20, 33), "int8")
    executable = rh.compile(Transposed, params={"w": w})
    result = rh.vm.VirtualMachine(executable)["main"](x).numpy()
    assert (result == np.maximum(x.T.astype("int32") @ w.T.astype("int32"), 0)).all()
    assert npu.counts["steps"] == 3 * 2 * 3


@pytest.mark.parametrize("seconds, extent", [(0.13, 128), (0.1, 256), (1e-4, 2048), (1e-9, 4096), (-1.0, 4096)])
def test_the_size_of_measured_products_follows_the_speed_of_a_device(seconds, extent):
    assert measure_devices._product_extent(seconds, 4096) == extent


@pytest.mark.slow  # compiles the kernels of a measurement
def test_a_slow_device_with_little_memory_is_measured_by_small_tensors(npu, monkeypatch):
    def time_call(call, devices):
        return 0.001 if call().shape[0] == 1 else 2.0  # of kernels of one row, and of others

    monkeypatch.setattr(measure_devices, "_time_call", time_call)
    figures = measure_devices._measure_device(rh.VDevice("ext_dev"))
    assert figures.products == dict.fromkeys(measure_devices.TYPES, 2.0 * 128**3 * 4 / 2.0)
    assert figures.bandwidth == 2 * npu.MEMORY_BYTES / 8 / 2.0


def test_functions_of_tvm_in_host_code(npu):
    """Command buffers call them with addresses, which name no device."""
    x = np.random.default_rng(0).standard_normal((7, 300)).astype("float32")
    result = rh.vm.VirtualMachine(rh.compile(Sorts))["main"](x).numpy()
    assert (result == -np.sort(2 * x, axis=1)[:, -30:][:, :3]).all()


@pytest.mark.parametrize(
    "name", [pytest.param("squeezenet", marks=pytest.mark.slow), pytest.param("minilm", marks=pytest.mark.slow)]
)
def test_a_network_cut_over_cpu_and_npu(npu, name, tmp_path):
    model = minilm(2, 16) if name == "minilm" else random_model(name)
    names, inputs = node_names(model), inputs_of(model)
    placement = cut(names, [len(names) // 3, len(names) // 2, len(names) * 4 // 5])
    executable = rh.compile(rh.from_onnx(model, ["llvm", "ext_dev"], placement))
    assert_both_devices_hold_ops(executable)
    assert_same(outputs_after_export(executable, inputs, tmp_path), expected_outputs(model, inputs))
    assert npu.counts["copies"] > 4


def test_a_loop_collects_rows_in_memory_of_the_device(npu):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        loop (int64 trips, float[n] x) => (float[rows, n] collected) {
            last, collected = Loop(trips, , x) <
                body = step (int64 i, bool on, float[n] v) => (bool go, float[n] w, float[n] v) {
                    go = Identity(on) w = Add(v, v) }>
        }""")
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, ["llvm", "ext_dev"], {"*": "ext_dev"})))
    rows = machine["main"](np.int64(5), np.ones(3, "float32")).numpy()
    assert (rows == 2.0 ** np.arange(5)[:, None]).all() and rows.shape == (5, 3)


def test_memory_ends(npu):
    memory = backend_of("ext_dev").memory()
    first = memory.allocate(1, 200 << 20, 64)
    with pytest.raises(rh.MemoryLimitError, match="the NPU has no 104,857,600 bytes left of 268,435,456"):
        memory.allocate(1, 100 << 20, 64)
    memory.free(1, first)
    assert memory.allocate(1, 100 << 20, 64) == first


@I.ir_module
class Large:
    I.module_global_infos({"vdevice": [I.vdevice("ext_dev")]})

    @R.function
    def main(x: R.Tensor((1,), "float32")):
        with R.dataflow():
            wide = R.broadcast_to(x, (1 << 30,))
            R.output(wide)
        return wide


def test_memory_that_a_model_lacks_is_named_each_time(npu):
    machine = rh.vm.VirtualMachine(rh.compile(Large))
    for call in (machine["main"], machine["main"], lambda x: machine.submit("main", x).result()):
        with pytest.raises(rh.MemoryLimitError, match="the NPU has no 4,294,967,296 bytes left"):
            call(np.ones(1, "float32"))


def test_the_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    project = (EXAMPLE / "pyproject.toml").read_text()
    (value,) = re.findall(rf'^\[project.entry-points."{ENTRY_POINTS}"\]\nnpu = "(.*)"$', project, re.MULTILINE)
    folder = tmp_path / "backend_npu-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: backend-npu\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nnpu = {value}\n")
    for path in (EXAMPLE, tmp_path):
        monkeypatch.syspath_prepend(path)
    table = backend._table.__wrapped__()  # as when the library first asks
    assert type(table["ext_dev"]).__name__ == "NpuBackend" and next(iter(table)) == "ext_dev"


def test_the_example_is_short_and_uses_public_names_only():
    text = (EXAMPLE / "backend_npu.py").read_text()
    assert len(text.splitlines()) < 400
    modules = [line.split()[1] for line in text.splitlines() if line.startswith(("from relax_hetero", "import relax"))]
    assert modules == ["relax_hetero", "relax_hetero.backends", "relax_hetero.encoding"]
