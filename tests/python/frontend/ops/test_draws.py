"""Random numbers have the distributions that they are drawn from."""

from __future__ import annotations

import numpy as np
from onnx import helper

from frontend.ops.checking import outputs_of


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
    u, v, n, b, m = outputs_of(nodes, feeds, {}, [1, 1, 1, 1, 6], vdevices=["llvm"])
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
