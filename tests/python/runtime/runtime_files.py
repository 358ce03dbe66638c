"""Files for the tests of this folder, which only load and run them: compiled where there is a compiler.

python tests/python/runtime/runtime_files.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from models.loops import LOOP_INPUTS, collecting_loop

KEY = b"signed with 16 bytes"
DECODER = """
    <ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 8] cache, float[n, 8] row) => (float[n, 8] new, float[n, 8] scores) {
        new = Add(cache, row)
        a = MatMul(new, w)
        b = Relu(a)
        c = MatMul(b, w)
        scores = Softmax(c)
    }"""
INPUTS = {
    "decoder": {
        "cache": np.linspace(-1, 1, 40, dtype="float32").reshape(5, 8),
        "row": np.linspace(0, 3, 40, dtype="float32").reshape(5, 8),
    },
    "loop": LOOP_INPUTS,
}


def write_files(folder: Path) -> None:
    """Export the models into a folder, with the results of INPUTS."""
    decoder = onnx.parser.parse_model(DECODER)
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
    decoder.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    placement = {"MatMul": "llvm:1", "Relu": "llvm:1", "Softmax": "llvm:1"}
    two = rh.from_onnx(decoder, vdevices=["llvm", "llvm"], placement=placement)
    executables = {
        "decoder": rh.compile(two, donate=["cache"]),
        "loop": rh.compile(rh.from_onnx(collecting_loop())),
    }
    for name, executable in executables.items():
        executable.export_library(folder / f"{name}.so", key=KEY)
        results = rh.vm.VirtualMachine(executable)["main"](**{k: v.copy() for k, v in INPUTS[name].items()})
        np.savez(folder / f"{name}.npz", *(tensor.numpy() for tensor in results))
    sizes = Sizes("gemma3", layers=2, width=224, feed_forward=288, heads=3, kv_heads=1, size=32, window=80, pattern=2)
    path = write_gguf(folder / "model.gguf", sizes, "Q8_0")
    model, tokenizer = rh.llm.load(path, batches=(2,), chunks=(32,), slots=3, context=320, page_type="float32")
    rh.llm.save(model, path, folder / "language_model")
    with rh.llm.Engine(model, tokenizer) as engine:
        deltas = engine.submit([1, 2, 3], rh.llm.SamplingParams(temperature=0, max_tokens=5))
        np.save(folder / "tokens.npy", [token for delta in deltas for token in delta.tokens])


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
