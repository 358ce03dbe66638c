"""Programs in C++ run exported files, with the bits of Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from models.attention_graphs import bert
from models.running import assert_both_devices_hold_ops, cut, outputs_of
from models.zoo import inputs_of, node_names, random_model
from relax_hetero.target.c_options import CMAKE_FOLDER, compile_options, link_options

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "cpp"
sys.path.insert(0, str(EXAMPLE))

from export import APP, main, write_tokens  # noqa: E402 (found beside the example)

sys.path.insert(0, str(APP))

from minilm_graph import build_minilm  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the compiled programs."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("classify", "similarity", "run"):
        command = ["g++", "-std=c++17", *WARNINGS, str(EXAMPLE / f"{name}.cpp"), "-o", str(folder / name)]
        done = subprocess.run([*command, *compile_options(), *link_options()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def output_of(*command: object, code: int = 0) -> str:
    """Output of a program that runs where it finds nothing of Python."""
    done = subprocess.run([str(word) for word in command], env={}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def check_run(programs: Path, folder: Path, executable: rh.vm.Executable, inputs: dict[str, np.ndarray]) -> str:
    """Require that `run` writes the bits of Python; returns what it prints."""
    executable.export_library(folder / "model.so")
    paths = []
    for name, array in inputs.items():
        paths.append(folder / f"{name}.bin")
        array.tofile(paths[-1])
    printed = output_of(programs / "run", folder / "model.so", 3, folder / "results", *paths)
    expected = b"".join(array.tobytes() for array in outputs_of(executable, inputs))
    assert (folder / "results").read_bytes() == expected
    return printed


def write_ppm(path: Path, height: int, width: int) -> np.ndarray:
    """Write a picture; returns its pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), "uint8")
    path.write_bytes(f"P6\n# a comment\n{width} {height}\n255\n".encode() + pixels.tobytes())
    return pixels


def check_classifier(programs: Path, folder: Path, model: onnx.ModelProto) -> None:
    executable = rh.compile(rh.from_onnx(model))
    executable.export_library(folder / "model.so")
    height, width = executable.signature().inputs[0].shape[2:]
    picture = write_ppm(folder / "picture.ppm", height + 3, width * 2)
    printed = output_of(programs / "classify", folder / "model.so", folder / "picture.ppm", folder / "scores")
    rows, columns = np.arange(height) * (height + 3) // height, np.arange(width) * 2
    image = picture[rows][:, columns].astype("float32") / np.float32(255)
    mean, deviation = (np.array(v, "float32") for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    image = ((image - mean) / deviation).transpose(2, 0, 1)[None]
    scores = outputs_of(executable, {executable.signature().inputs[0].name: image})[0].reshape(-1)
    np.testing.assert_array_equal(np.fromfile(folder / "scores", "float32"), scores)
    assert printed.splitlines()[0].startswith(f"class {scores.argmax()}: ")


def test_an_image_classifier(programs, tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[1, 3, 12, 10] x, float[8, 3, 3, 3] a, float[20, 8] b) => (float[1, 20] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, a)
            r = Relu(c)
            p = GlobalAveragePool(r)
            f = Flatten(p)
            y = Gemm <transB = 1> (f, b)
        }""")
    generator = np.random.default_rng(1)
    weights = [generator.standard_normal(shape).astype("float32") for shape in ((8, 3, 3, 3), (20, 8))]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for w, n in zip(weights, "ab", strict=True))
    del model.graph.input[1:]
    check_classifier(programs, tmp_path, model)
    assert "not a picture in PPM" in output_of(programs / "classify", tmp_path / "model.so", __file__, code=1)


@pytest.mark.slow  # compiles a network of 26 convolutions
def test_squeezenet(programs, tmp_path):
    check_classifier(programs, tmp_path, random_model("squeezenet"))


def tiny_weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    table = {"embeddings.word_embeddings": (10, 8), "embeddings.position_embeddings": (6, 8)}
    table |= {"embeddings.token_type_embeddings": (2, 8), "embeddings.LayerNorm": (8,)}
    layer = "encoder.layer.0"
    table |= {f"{layer}.attention.self.{part}": (8, 8) for part in ("query", "key", "value")}
    table |= {f"{layer}.attention.output.dense": (8, 8), f"{layer}.attention.output.LayerNorm": (8,)}
    table |= {f"{layer}.intermediate.dense": (16, 8), f"{layer}.output.dense": (8, 16)}
    table |= {f"{layer}.output.LayerNorm": (8,)}
    weights = {f"{name}.weight": generator.standard_normal(shape).astype("float32") for name, shape in table.items()}
    return weights | {f"{name}.bias": np.zeros(shape[0], "float32") for name, shape in table.items()}


def test_sentence_similarity_on_two_devices(programs, tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 6}
    model = build_minilm(tiny_weights(), config, "batch", "seq")
    names = node_names(model)
    placement = cut(names, [len(names) // 2])
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement))
    assert_both_devices_hold_ops(executable)
    executable.export_library(tmp_path / "model.so")
    ids = np.random.default_rng(0).integers(0, 10, (3, 5))
    tokens = {"input_ids": ids, "attention_mask": np.array([[1] * 5, [1] * 3 + [0] * 2, [1] * 4 + [0]])}
    check_similarity(programs, tmp_path, tmp_path / "model.so", tokens)


def check_similarity(programs: Path, folder: Path, model: Path, tokens: dict[str, np.ndarray]) -> None:
    write_tokens(folder / "tokens", tokens)
    printed = output_of(programs / "similarity", model, folder / "tokens", folder / "embeddings")
    embeddings = rh.vm.VirtualMachine(rh.load(model))["main"](**tokens).numpy()
    np.testing.assert_array_equal(np.fromfile(folder / "embeddings", "float32").reshape(embeddings.shape), embeddings)
    order = 1 + np.argsort(-(embeddings[1:] @ embeddings[0]))
    sentences = [line.split()[1].rstrip(":") for line in printed.splitlines() if line.startswith("sentence")]
    assert sentences == [str(number) for number in order]


@pytest.mark.slow  # compiles MiniLM twice, and configures CMake
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_minilm_and_cmake(tmp_path):
    main([str(tmp_path)])
    settings = [f"-Drelax_hetero_DIR={CMAKE_FOLDER}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["cmake", "-S", EXAMPLE, "-B", tmp_path, *settings], ["cmake", "--build", tmp_path]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    numbers = np.fromfile(tmp_path / "tokens.bin", "int64")
    ids, mask = numbers[2:].reshape(2, *numbers[:2])
    for name in ("similarity.so", "similarity_two.so"):
        check_similarity(tmp_path, tmp_path, tmp_path / name, {"input_ids": ids, "attention_mask": mask})


def test_two_devices_and_results_of_integers(programs, tmp_path):
    model = bert()
    names = node_names(model)
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=cut(names, [3, len(names) - 4])))
    assert_both_devices_hold_ops(executable)
    printed = check_run(programs, tmp_path, executable, inputs_of(model))
    assert printed.startswith("device llvm:0\ndevice llvm:1\nfunction main\n  takes x: float32[1, 21, 32]\n")


LOOP = """
    <ir_version: 8, opset_import: ["" : 18]>
    net (int64 trips, float[3] x, float limit) => (float[3] sum, float[N, 3] rows, int64[1, M] places, int64[2] s) {
        sum, rows = Loop (trips, , x) <
          body = trip (int64 i, bool c, float[3] a) => (bool again, float[3] b, float[3] r) {
            b = Add(a, x)
            r = Identity(b)
            total = ReduceSum <keepdims = 0> (b)
            again = Less(total, limit)
        }>
        places = NonZero(x)
        s = Shape(rows)
    }"""


def test_functions_of_python_that_files_bring_along(programs, tmp_path):
    """A loop that collects rows until a condition holds, NonZero, and a shape that is read."""
    executable = rh.compile(rh.from_onnx(onnx.parser.parse_model(LOOP)))
    inputs = {"trips": np.array(1 << 40), "x": np.array([1, -0.0, 2], "float32"), "limit": np.array(100, "float32")}
    check_run(programs, tmp_path, executable, inputs)


def test_errors_say_what_is_wrong(programs, tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[5, 4] x, int64[2] i) => (float[2, 4] y) { y = Gather(x, i) }""")
    executable = rh.compile(rh.from_onnx(model))
    check_run(programs, tmp_path, executable, {"x": np.ones((5, 4), "float32"), "i": np.array([4, -5])})
    run = [programs / "run", tmp_path / "model.so", 0, tmp_path / "results", tmp_path / "x.bin"]
    assert "expects 2 arguments (x, i), but 1 arguments" in output_of(*run, code=1)
    np.array([0, 5]).tofile(tmp_path / "i.bin")
    assert "index 5 is out of range, expected -5 to 4" in output_of(*run, tmp_path / "i.bin", code=1)
    assert "i.bin: rh_tensor_write: found 16 bytes, expected 80" in output_of(*run[:4], tmp_path / "i.bin", code=1)
    (tmp_path / "other.so").write_bytes(b"no library")
    assert "other.so" in output_of(programs / "run", tmp_path / "other.so", 0, tmp_path / "results", code=1)


PROGRAM_IN_C = r"""
#include <relax_hetero.h>

int main(int argc, char **argv) {
    DLDevice cpu = {kDLCPU, 3};
    rh_model *model = rh_load(argv[argc - 1], &cpu, 1);
    if (model == NULL)
        return puts(rh_error()), 1;
    const rh_function_info *function = rh_find(model, "main");
    int64_t shape[] = {2, 3}, other[] = {4, 4}, third[] = {3, 4};
    float ones[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, product[8];
    rh_tensor *args[] = {rh_tensor_new(rh_float32, 2, shape, cpu), rh_tensor_new(rh_float32, 2, other, cpu)}, *y = NULL;
    rh_tensor_write(args[0], ones, 6 * sizeof(float));
    if (rh_run(model, function, args, 2, &y, 1) < 0)
        puts(rh_error());
    rh_tensor_free(args[1]);
    args[1] = rh_tensor_new(rh_float32, 2, third, cpu);
    rh_tensor_write(args[1], ones, sizeof ones);
    if (rh_run(model, function, args, 2, &y, 1) != 1 || rh_tensor_read(y, product, sizeof product) != 0)
        return puts(rh_error()), 1;
    printf("%s on device %d: %g\n", function->outputs[0].type, rh_tensor_dl(y)->device.device_id, product[7]);
    if (rh_find(model, "other") == NULL)
        puts(rh_error());
    rh_tensor_free(args[0]), rh_tensor_free(args[1]), rh_tensor_free(y), rh_free(model);
    return 0;
}
"""


def test_a_program_in_c(tmp_path):
    """Another device of the same type, and sizes that a call refuses."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[n, k] x, float[l, 4] y) => (float[n, 4] z) { z = MatMul(x, y) }""")
    rh.compile(rh.from_onnx(model)).export_library(tmp_path / "model.so")
    (tmp_path / "program.c").write_text(PROGRAM_IN_C)
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "program.c", "-o", "program"]
    subprocess.run([*command, *compile_options(), *link_options()], cwd=tmp_path, check=True)
    refusal, result, unknown = output_of(tmp_path / "program", tmp_path / "model.so").splitlines()
    assert refusal.startswith("function 'main': ") and refusal.endswith("expected k == l (k = 3, l = 4)")
    assert result == "float32[n, 4] on device 3: 3"
    assert unknown == "other: no function of the model has this name, expected one of main"
