"""A prompt and several steps of a decoder, by this library and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from seeds import fresh_rng


def zero_caches(model: onnx.ModelProto, batch: int, length: int) -> dict[str, np.ndarray]:
    """Zero caches of `length` positions for all cache inputs."""
    arrays = {}
    for info in model.graph.input:
        if info.name.startswith("past_key_values."):
            dims = info.type.tensor_type.shape.dim
            dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            arrays[info.name] = np.zeros((batch, dims[1].dim_value, length, dims[3].dim_value), dtype)
    return arrays


def check_steps(
    model: onnx.ModelProto,
    main: Any,
    length: int = 0,
    batch: int = 2,
    rows: tuple[int, ...] = (5, 1, 1, 1),
    rtol: float = 1e-3,
) -> Mapping[str, np.ndarray]:
    """Compare logits and caches after every call; `length` is that of a shared cache, 0 for one that grows.

    Each call gets the caches that the one before gave. Returns the last feeds.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [info.name for info in model.graph.input]
    tokens = fresh_rng().integers(0, 50, (batch, sum(rows)))
    past = zero_caches(model, batch, length)
    theirs, feeds, done = dict(past), {}, 0
    for count in rows:
        total = done + count
        feeds = {"input_ids": tokens[:, done:total], "attention_mask": np.ones((batch, total), "int64")}
        if "position_ids" in names:
            feeds["position_ids"] = np.broadcast_to(np.arange(done, total), (batch, count)).copy()
        expected = session.run(None, {**feeds, **theirs})
        results = main(**feeds, **past)
        actual = [result.numpy() for result in results]
        assert len(actual) == len(expected)
        np.testing.assert_allclose(actual[0], expected[0], rtol, rtol / 10)
        for own, want in zip(actual[1:], expected[1:], strict=True):
            assert own.shape == want.shape
            np.testing.assert_allclose(own[:, :, :total], want[:, :, :total], rtol, rtol / 10)
        theirs = dict(zip(past, expected[1:], strict=True))
        past = dict(zip(past, actual[1:] if not length else past.values(), strict=True))
        done = total
    return feeds | past
