"""An engine over an ONNX decoder: what it writes is what ONNX Runtime finds the most probable."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import relax_hetero as rh
from frontend.onnx_decoder.decoder_graphs import GenAI, Shape
from frontend.onnx_decoder.steps import zero_caches
from llm.toy_model import ToyCodec
from relax_hetero.llm import Engine, SamplingParams

SHAPE = Shape(layers=1, size=64, positions=128)
COUNT = 12


def greedy(model: onnx.ModelProto, prompt: list[int]) -> list[int]:
    """The most probable tokens, one after the other, with no cache at all."""
    session, tokens = onnxruntime.InferenceSession(model.SerializeToString()), list(prompt)
    for _ in range(COUNT):
        feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), "int64")}
        logits = session.run(["logits"], feeds | zero_caches(model, 1, 0))[0][0, -1]
        best, second = np.sort(logits)[::-1][:2]
        assert best - second > 1e-4 * np.abs(logits).max()  # else rounding decides
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_requests_that_run_together(tmp_path):
    model = GenAI(shape=SHAPE, window=24).model()
    onnx.save(model, tmp_path / "decoder.onnx")
    (tmp_path / "genai_config.json").write_text('{"model": {"decoder": {"filename": "decoder.onnx"}}}')
    prompts = [np.random.default_rng(seed).integers(0, SHAPE.vocabulary, 20 * seed).tolist() for seed in (1, 2, 3)]
    compiled = rh.llm.load_onnx(tmp_path, batches=(2,), chunks=(32,), slots=3, context=128, page_type="float32")
    assert compiled.description.windows == (24,)
    with Engine(compiled, ToyCodec()) as engine:
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        texts = [request.result(60) for request in requests]
    assert texts == [ToyCodec().decode(greedy(model, prompt)) for prompt in prompts]
