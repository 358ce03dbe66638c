"""The demo: a graph that is the published model, and a run that ranks sentences on two devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

ROOT = Path(__file__).resolve().parents[3]
APP = ROOT / "apps" / "sentence_similarity"
sys.path.insert(0, str(APP))

from minilm import SentenceTokenizer, default_cache, onnx_path  # noqa: E402 (found beside the example)
from minilm_graph import build_minilm  # noqa: E402

TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 6,
}


def tiny_weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"embeddings.word_embeddings": (10, 8), "embeddings.position_embeddings": (6, 8)}
    shapes |= {"embeddings.token_type_embeddings": (2, 8), "embeddings.LayerNorm": (8,)}
    layer = "encoder.layer.0"
    shapes |= {f"{layer}.attention.self.{part}": (8, 8) for part in ("query", "key", "value")}
    shapes |= {f"{layer}.attention.output.dense": (8, 8), f"{layer}.attention.output.LayerNorm": (8,)}
    shapes |= {
        f"{layer}.intermediate.dense": (16, 8),
        f"{layer}.output.dense": (8, 16),
        f"{layer}.output.LayerNorm": (8,),
    }
    weights = {f"{name}.weight": generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    return weights | {f"{name}.bias": np.zeros(shape[0], "float32") for name, shape in shapes.items()}


def test_node_names_follow_the_model():
    model = build_minilm(tiny_weights(), TINY, batch=2, seq=4)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"/embeddings/word/Gather", "/encoder/layer.0/attention/query/MatMul", "/normalize/Div"} <= set(names)
    assert all(node.name.rpartition("/")[2] == node.op_type for node in model.graph.node)


def test_padding_does_not_change_an_embedding():
    short, long = (build_minilm(tiny_weights(), TINY, batch=1, seq=seq) for seq in (3, 6))
    ids = np.array([[1, 5, 7]])
    padded = {"input_ids": np.array([[1, 5, 7, 9, 9, 9]]), "attention_mask": np.array([[1, 1, 1, 0, 0, 0]])}
    embeddings = [
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)[0]
        for model, inputs in ((short, {"input_ids": ids, "attention_mask": np.ones_like(ids)}), (long, padded))
    ]
    np.testing.assert_allclose(embeddings[0], embeddings[1], rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(embeddings[0]) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("seq", [0, 7])
def test_a_length_without_positions_is_an_error(seq: int):
    with pytest.raises(ValueError, match="1 to 6"):
        build_minilm(tiny_weights(), TINY, batch=1, seq=seq)


def test_it_is_the_published_model():
    """The similarities that the model's card shows for these sentences."""
    cache = default_cache()
    session = onnxruntime.InferenceSession(str(onnx_path(cache, 4, 32)))
    sentences = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    embeddings = session.run(None, SentenceTokenizer(cache, 32)(sentences))[0]
    np.testing.assert_allclose(embeddings[0] @ embeddings[1:].T, [0.695, 0.943, 0.257], atol=5e-4)


def test_the_onnx_file_is_valid_and_small_enough_for_one_file():
    model = onnx.load(str(onnx_path(default_cache(), 4, 32)))
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["input_ids", "attention_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_low_precision_ranks_as_float32_does(precision: str):
    command = [sys.executable, APP / "run.py", "--precision", precision]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Same order as ONNX Runtime" in done.stdout
    places = [done.stdout.index(word) for word in ("reset your login", "your credentials", "Two-factor", "front door")]
    assert places == sorted(places)


def test_the_demo_ranks_sentences_on_two_devices(tmp_path: Path):
    (tmp_path / "sentences.txt").write_text(
        "A cheesecake needs an hour in the oven.\n\nYou can change your password.\n"
    )
    command = [sys.executable, APP / "run.py", "--sentences", tmp_path / "sentences.txt"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "llvm:0" in done.stdout and "llvm:1" in done.stdout
    assert done.stdout.index("change your password") < done.stdout.index("cheesecake")
    assert "Same as ONNX Runtime" in done.stdout
