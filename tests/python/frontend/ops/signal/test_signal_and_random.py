"""Fourier transforms against numpy, random numbers by their distributions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from frontend.ops.checking import node_model, uniform


def _outputs(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    types: list[int],
    **options: object,
) -> list[np.ndarray]:
    infos = [helper.make_tensor_value_info(name, 1, value.shape) for name, value in feeds.items()]
    outputs = [
        helper.make_tensor_value_info(node.output[0], kind, None) for node, kind in zip(nodes, types, strict=True)
    ]
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos, outputs, weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, **options)))
    return [value.numpy() for value in machine["main"](**feeds)]


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
    found = _outputs(nodes, {"real": real, "pairs": pairs}, constants, [1] * 8)
    frames = np.stack([real[:, i : i + 4, 0] * constants["window"] for i in range(6)], 1)
    wanted = [
        np.fft.rfft(real[..., 0], axis=1),
        np.fft.fft(real[..., 0], 12, axis=1),
        np.fft.fft(waves, 4, axis=1),
        np.fft.ifft(waves, axis=1),
        np.fft.irfft(waves, axis=1),
        np.fft.irfft(waves, 12, axis=1),
        np.fft.irfft(waves, 4, axis=1),
        np.fft.rfft(frames, axis=2),
    ]
    for result, array in zip(found, wanted, strict=True):
        is_complex = np.iscomplexobj(array)
        expected = np.stack([array.real, array.imag], -1) if is_complex else array[..., None]
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, 1e-5, 1e-5)


def test_random_numbers_have_their_distributions():
    count = 20000
    feeds = {"p": np.full((count,), 0.25, "float32"), "logs": np.log(np.array([[1, 2, 5]], "float32"))}
    nodes = [
        helper.make_node("RandomUniform", [], ["u"], shape=[count], low=-1.0, high=3.0),
        helper.make_node("RandomUniform", [], ["v"], shape=[count], low=-1.0, high=3.0),
        helper.make_node("RandomNormalLike", ["p"], ["n"], mean=2.0, scale=3.0, seed=7.0),
        helper.make_node("Bernoulli", ["p"], ["b"], seed=1.0),
        helper.make_node("Multinomial", ["logs"], ["m"], sample_size=count),
    ]
    u, v, n, b, m = _outputs(nodes, feeds, {}, [1, 1, 1, 1, 6], vdevices=["llvm"])
    assert u.min() >= -1
    assert u.max() <= 3
    assert abs(u.mean() - 1) < 0.05
    assert abs(u.std() - 4 / 12**0.5) < 0.03
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.03
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03
    assert abs(n.mean() - 2) < 0.1
    assert abs(n.std() - 3) < 0.1
    assert abs(b.mean() - 0.25) < 0.02
    np.testing.assert_allclose(np.bincount(m[0], minlength=3) / count, [1 / 8, 2 / 8, 5 / 8], atol=0.02)


def test_transforms_of_unknown_length_are_refused():
    model, _ = node_model("DFT", [uniform(2, 9, 1), np.array(4)], 17)
    with pytest.raises(rh.HeteroError, match="DFT node 'the_node'.*dft_length"):
        rh.from_onnx(model)
