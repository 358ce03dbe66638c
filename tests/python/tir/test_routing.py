"""Routing of rows to experts: numbers of the kernel of CPUs, and of that of GPUs by their interpreter."""

import numpy as np
import pytest
import tvm

from gpu_interpreter import run as interpreted
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.loops import schedule
from relax_hetero.tir.routing import RoutingProblem, routing_kernel
from seeds import fresh_rng

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def wanted(scores, problem):
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : problem.used]
    powers = np.exp(scores.astype("float64") - scores.max(1, keepdims=True))
    chosen = np.take_along_axis(powers, ids, 1)
    total = chosen if problem.normalizes else powers
    return ids, chosen / total.sum(1, keepdims=True) * problem.scale


def routed(problem, scores, on_gpu):
    """Ids and shares by the kernel of a device; their memory is poisoned before."""
    kernel, count = routing_kernel(problem), len(scores)
    ids, shares = np.full((count, problem.used), -7, "int32"), np.full((count, problem.used), np.nan, "float32")
    if on_gpu:
        interpreted(schedule(kernel.with_attr("target", TARGET), gpu_target_of(TARGET)), scores, ids, shares)
        return ids, shares
    arrays = [tvm.runtime.tensor(array) for array in (scores, ids, shares)]
    tvm.compile(kernel.with_attr("global_symbol", "routing"), "llvm")["routing"](*arrays)
    return arrays[1].numpy(), arrays[2].numpy()


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("rows", "experts", "used", "scale", "normalizes"),
    [
        (1, 8, 3, 1.0, True),
        (5, 128, 8, 2.5, True),
        (3, 33, 1, 1.0, False),
        ("rows", 70, 4, 0.5, False),
        (40, 4, 4, 1.0, True),
    ],
)
def test_the_experts_with_the_greatest_scores(rows, experts, used, scale, normalizes, on_gpu):
    scores = fresh_rng().standard_normal((rows if isinstance(rows, int) else 6, experts)).astype("float32")
    scores[0, experts // 2] = scores[0].max()  # equal ones
    problem = RoutingProblem(rows, experts, used, scale, normalizes)
    ids, shares = routed(problem, scores, on_gpu)
    want_ids, want_shares = wanted(scores, problem)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(shares, want_shares, rtol=1e-6)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_experts_exist_whatever_the_scores(value, on_gpu):
    ids, _ = routed(RoutingProblem(2, 40, 3), np.full((2, 40), value, "float32"), on_gpu)
    assert ((ids >= 0) & (ids < 40)).all()
