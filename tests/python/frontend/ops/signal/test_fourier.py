"""Fourier transforms against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import relax_hetero as rh
from frontend.ops.checking import node_model, outputs_of, uniform


@pytest.mark.slow
def test_transforms_of_all_forms():
    real, pairs = uniform(2, 9, 1), uniform(2, 6, 2)
    waves = pairs[..., 0] + 1j * pairs[..., 1]
    constants = {"twelve": np.array(12), "four": np.array(4), "axis": np.array(1), "window": uniform(4)}
    nodes = [
        helper.make_node("DFT", ["real", "", "axis"], ["a"], onesided=1),
        helper.make_node("DFT", ["real", "twelve"], ["b"]),
        helper.make_node("DFT", ["pairs", "four", "axis"], ["c"]),
        helper.make_node("DFT", ["pairs", "", "axis"], ["d"], inverse=1),
        helper.make_node("DFT", ["pairs", "", "axis"], ["e"], inverse=1, onesided=1),
        helper.make_node("DFT", ["pairs", "twelve", "axis"], ["f"], inverse=1, onesided=1),
        helper.make_node("DFT", ["pairs", "four", "axis"], ["g"], inverse=1, onesided=1),
        helper.make_node("STFT", ["real", "axis", "window"], ["h"]),
    ]
    actual = outputs_of(nodes, {"real": real, "pairs": pairs}, constants, [1] * 8)
    frames = np.stack([real[:, i : i + 4, 0] * constants["window"] for i in range(6)], 1)
    want = [
        np.fft.rfft(real[..., 0], axis=1),
        np.fft.fft(real[..., 0], 12, axis=1),
        np.fft.fft(waves, 4, axis=1),
        np.fft.ifft(waves, axis=1),
        np.fft.irfft(waves, axis=1),
        np.fft.irfft(waves, 12, axis=1),
        np.fft.irfft(waves, 4, axis=1),
        np.fft.rfft(frames, axis=2),
    ]
    for result, array in zip(actual, want, strict=True):
        is_complex = np.iscomplexobj(array)
        expected = np.stack([array.real, array.imag], -1) if is_complex else array[..., None]
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, 1e-5, 1e-5)


def test_transforms_of_unknown_length_are_refused():
    model, _ = node_model("DFT", [uniform(2, 9, 1), np.array(4)], 17)
    with pytest.raises(rh.HeteroError, match="DFT node 'the_node'.*dft_length"):
        rh.from_onnx(model)
