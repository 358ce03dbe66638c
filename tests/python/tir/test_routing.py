"""Routing of rows to experts: numbers of the kernel of CPUs, and of that of GPUs by their interpreter."""

import numpy as np
import pytest
import tvm

from gpu_interpreter import run as interpreted
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.loops import schedule
from relax_hetero.tir.routing import RoutingProblem, routing_kernel
from seeds import fresh_rng

ON_DEVICES = pytest.mark.parametrize("arch", ["", "sm_75", "sm_90a"], ids=["cpu", "sm_75", "sm_90a"])
"""The CPU, and GPUs without and with reductions of a warp by one instruction."""


def wanted(scores, problem, bias):
    """Ids and shares in float64."""
    x = scores.astype("float64")
    powers = np.exp(x - x.max(1, keepdims=True)) if problem.is_softmax else 1 / (1 + np.exp(-x))
    order = powers / powers.sum(1, keepdims=True) if problem.is_softmax else powers.copy()
    if bias is not None:
        order += bias
    if problem.groups > 1:
        grouped = order.reshape(len(order), problem.groups, -1)
        ranked = np.sort(grouped, -1)[..., -problem.group_best :].sum(-1)
        dropped = np.argsort(-ranked, axis=1, kind="stable")[:, problem.groups_used :]
        np.put_along_axis(grouped, dropped[..., None], -np.inf, 1)
    ids = np.argsort(-order, axis=1, kind="stable")[:, : problem.used]
    chosen = np.take_along_axis(powers, ids, 1)
    if problem.normalizes or problem.is_softmax:
        chosen = chosen / (chosen if problem.normalizes else powers).sum(1, keepdims=True)
    return ids, chosen * problem.scale


def routed(problem, scores, arch, bias=None):
    """Ids and shares by the kernel of a device; their memory is poisoned before."""
    kernel, count = routing_kernel(problem), len(scores)
    ids, shares = np.full((count, problem.used), -7, "int32"), np.full((count, problem.used), np.nan, "float32")
    inputs = [scores] if bias is None else [scores, bias]
    return _run(kernel, [*inputs, ids, shares], arch)[-2:]


def _run(kernel, arguments, arch):
    """Arguments after a run of a device's kernel."""
    if arch:
        target = tvm.target.Target({"kind": "cuda", "arch": arch})
        interpreted(schedule(kernel.with_attr("target", target), gpu_target_of(target)), *arguments)
        return arguments
    tensors = list(map(tvm.runtime.tensor, arguments))
    tvm.compile(kernel.with_attr("global_symbol", "routing"), "llvm")["routing"](*tensors)
    return [tensor.numpy() for tensor in tensors]


@ON_DEVICES
@pytest.mark.parametrize(
    "problem",
    [
        RoutingProblem(1, 8, 3),
        RoutingProblem(5, 128, 8, 2.5),
        RoutingProblem(3, 33, 1, normalizes=False),
        RoutingProblem("rows", 70, 4, 0.5, normalizes=False),
        RoutingProblem(40, 4, 4, kind="softmax_of_chosen"),
        RoutingProblem(7, 33, 5, 2.5, kind="sigmoid"),
        RoutingProblem(7, 20, 5, normalizes=False, kind="sigmoid", has_bias=True),
        RoutingProblem(9, 40, 6, has_bias=True),
        RoutingProblem(9, 40, 6, normalizes=False, has_bias=True, groups=4, groups_used=2),
        RoutingProblem(5, 60, 5, 16.0, normalizes=False, groups=5, groups_used=3),
        RoutingProblem(5, 256, 8, 2.5, kind="sigmoid", has_bias=True, groups=8, groups_used=4),
        RoutingProblem("rows", 6, 3, kind="sigmoid", groups=6, groups_used=4),
        RoutingProblem(9, 40, 6, 2.5, first=16, own=13),
        RoutingProblem("rows", 9, 9, normalizes=False, kind="sigmoid", first=4, own=5),
    ],
    ids=str,
)
def test_the_experts_with_the_greatest_scores(problem, arch):
    generator, rows = fresh_rng(), problem.rows if isinstance(problem.rows, int) else 6
    scores = generator.standard_normal((rows, problem.experts)).astype("float32")
    scores[0, problem.experts // 2] = scores[0].max()  # equal ones
    bias = generator.standard_normal(problem.experts).astype("float32") / 4 if problem.has_bias else None
    ids, shares = routed(problem, scores, arch, bias)
    want_ids, want_shares = wanted(scores, problem, bias)
    if problem.own:
        numbers = want_ids - problem.first
        want_ids = np.where((numbers >= 0) & (numbers < problem.own), numbers, -1)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(shares, want_shares, rtol=2e-6)


@ON_DEVICES
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("groups", [1, 4])
def test_experts_exist_whatever_the_scores(groups, value, arch):
    problem = RoutingProblem(2, 40, 3, groups=groups, groups_used=(groups + 1) // 2)
    ids, _ = routed(problem, np.full((2, 40), value, "float32"), arch)
    assert ((ids >= 0) & (ids < 40)).all()


@ON_DEVICES
def test_shares_are_numbers_where_all_sigmoids_vanish(arch):
    problem = RoutingProblem(2, 40, 3, kind="sigmoid")
    _, shares = routed(problem, np.full((2, 40), -120, "float32"), arch)
    assert (shares == 0).all()


@ON_DEVICES
@pytest.mark.parametrize("rows", [3, 45])
def test_counts_of_experts(rows, arch):
    """Counts grow by the rows of a sequence that chose an expert; other rows are padding."""
    generator, problem = fresh_rng(), RoutingProblem(rows, 9, 4, has_bias=rows == 3, has_counts=True)
    scores, sequences = generator.standard_normal((rows, 9), "float32"), generator.integers(-1, 2, rows, "int32")
    before = generator.integers(0, 100, 9, "int32")
    inputs = [scores, *([np.zeros(9, "float32")] if rows == 3 else []), sequences, before.copy()]
    results = np.full((rows, 4), -7, "int32"), np.full((rows, 4), np.nan, "float32")
    arguments = _run(routing_kernel(problem), [*inputs, *results], arch)
    ids = arguments[-2]
    np.testing.assert_array_equal(ids, wanted(scores, problem, None)[0])
    np.testing.assert_array_equal(arguments[-3] - before, np.bincount(ids[sequences >= 0].ravel(), minlength=9))
