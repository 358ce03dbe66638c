"""Programs in C++ that run exported files, for tests: compiled, called, and compared with Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from models.running import outputs_of
from relax_hetero.target.c_options import compile_options, link_options
from relax_hetero.target.runtime_libraries import cuda_libraries

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"
sys.path.insert(0, str(EXAMPLE))

from export import APP, write_tokens  # noqa: E402 (found beside the example)

sys.path.insert(0, str(APP))

from minilm_graph import build_minilm  # noqa: E402

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")


def compile_program(source: Path, program: Path) -> Path:
    """Compile a program; returns `program`."""
    command = ["g++", "-std=c++17", "-pthread", *WARNINGS, str(source), "-o", str(program)]
    done = subprocess.run([*command, *compile_options(), *link_options()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def compile_examples(folder: Path) -> Path:
    """Compile the example's programs into a folder; returns it."""
    for name in ("classify", "similarity", "run"):
        compile_program(EXAMPLE / f"{name}.cpp", folder / name)
    return folder


def output_of(*command: object, code: int = 0) -> str:
    """Output of a program that runs where it finds nothing of Python."""
    folders = [str(path.parent) for path in cuda_libraries("libcudart.so.*[0-9]")]
    folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(folders)}  # of CUDA, for files of GPUs
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    assert done.returncode == code, (done.returncode, done.stderr)
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


def check_classifier(programs: Path, folder: Path, executable: rh.vm.Executable) -> None:
    """Require that `classify` finds the scores of Python."""
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


def small_network() -> onnx.ModelProto:
    """An image classifier of one convolution."""
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
    return model


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


def tiny_minilm() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """MiniLM of one narrow layer, and tokens of three sentences."""
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 6}
    ids = np.random.default_rng(0).integers(0, 10, (3, 5))
    mask = np.array([[1] * 5, [1] * 3 + [0] * 2, [1] * 4 + [0]])
    return build_minilm(tiny_weights(), config, "batch", "seq"), {"input_ids": ids, "attention_mask": mask}


def check_similarity(programs: Path, folder: Path, model: Path, tokens: dict[str, np.ndarray]) -> None:
    """Require that `similarity` finds the embeddings of Python, and orders sentences by them."""
    write_tokens(folder / "tokens", tokens)
    printed = output_of(programs / "similarity", model, folder / "tokens", folder / "embeddings")
    embeddings = rh.vm.VirtualMachine(rh.load(model))["main"](**tokens).numpy()
    np.testing.assert_array_equal(np.fromfile(folder / "embeddings", "float32").reshape(embeddings.shape), embeddings)
    order = 1 + np.argsort(-(embeddings[1:] @ embeddings[0]))
    sentences = [line.split()[1].rstrip(":") for line in printed.splitlines() if line.startswith("sentence")]
    assert sentences == [str(number) for number in order]
