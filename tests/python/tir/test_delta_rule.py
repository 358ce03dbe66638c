"""The gated delta rule and its convolution: kernels of CPUs, and those of GPUs by their interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import tvm

from gpu_interpreter import run as interpreted
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.loops import schedule
from relax_hetero.tir.delta_rule import DeltaRuleProblem, convolution_kernel, delta_rule_kernel
from seeds import fresh_rng

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
SMALL = DeltaRuleProblem(2, 4, 8, 16, 4, False, rows=5, slots=3, is_chunk=False)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Sequences:
    """States of all slots in float64: the last inputs of the convolution, and a matrix for each head."""

    def __init__(self, problem):
        self.problem = problem
        self.inputs = np.zeros((problem.slots, problem.taps, problem.channels))
        self.matrices = np.zeros((problem.slots, problem.value_heads, problem.key_size, problem.value_size))

    def convolved(self, x, weights, sequences):
        results = np.zeros_like(x)
        for row, slot in enumerate(sequences):
            if slot >= 0:
                self.inputs[slot] = np.concatenate([self.inputs[slot, 1:], x[row : row + 1]])
                total = (self.inputs[slot] * weights).sum(0)
                results[row] = total * sigmoid(total)
        return results

    def updated(self, x, beta, alpha, a, dt, sequences):
        p = self.problem
        results = np.zeros((p.rows, p.value_heads, p.value_size))
        width = p.key_heads * p.key_size
        heads = np.arange(p.value_heads)
        heads = heads % p.key_heads if p.is_tiled else heads // (p.value_heads // p.key_heads)
        for row, slot in enumerate(sequences):
            if slot < 0:
                continue
            q, k = (x[row, i * width : (i + 1) * width].reshape(p.key_heads, -1)[heads] for i in range(2))
            q, k = (v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-6) for v in (q, k))
            v = x[row, 2 * width :].reshape(p.value_heads, -1)
            matrix = self.matrices[slot] * np.exp(a * np.log1p(np.exp(alpha[row] + dt)))[:, None, None]
            change = (v - np.einsum("hkv,hk->hv", matrix, k)) * sigmoid(beta[row])[:, None]
            self.matrices[slot] = matrix + k[:, :, None] * change[:, None]
            results[row] = np.einsum("hkv,hk->hv", self.matrices[slot], q) / np.sqrt(p.key_size)
        return results.reshape(p.rows, -1)


def run(kernel, arguments, on_gpu):
    """Arguments after a run of a device's kernel."""
    if on_gpu:
        interpreted(schedule(kernel.with_attr("target", TARGET), gpu_target_of(TARGET)), *arguments)
        return arguments
    tensors = list(map(tvm.runtime.tensor, arguments))
    tvm.compile(kernel.with_attr("global_symbol", "kernel"), "llvm")["kernel"](*tensors)
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        replace(SMALL, is_tiled=True, taps=3, key_size=5, value_size=12),
        replace(SMALL, is_chunk=True),
        replace(SMALL, rows=3, key_heads=1, value_heads=2, key_size=40, value_size=64, is_chunk=True),
    ],
    ids=str,
)
def test_rows_continue_their_sequences(problem, on_gpu):
    """Calls with rows of several sequences, several of one sequence, and of none."""
    rng, p = fresh_rng(), problem
    weights, a, dt = (rng.standard_normal(shape) for shape in ((p.taps, p.channels), p.value_heads, p.value_heads))
    a = -np.exp(a)
    # Memory of states is arbitrary before position 0.
    states, expected = np.full((p.slots, p.elements), np.nan, "float32"), Sequences(p)
    lengths = [0] * p.slots
    calls = [[1] * (p.rows - 1) + [-1], [1] * p.rows] if p.is_chunk else [[2, -1, 0, -1, 2], [0, 1, 2, 1, 1]]
    for sequences in calls:
        positions = []
        for slot in sequences:
            positions.append(max(lengths[slot], 0) if slot >= 0 else 0)
            lengths[slot] += slot >= 0
        rows = np.array(sequences, "int32"), np.array(positions, "int32")
        x, beta, alpha = (rng.standard_normal((p.rows, n)) for n in (p.channels, p.value_heads, p.value_heads))
        poison = [np.full((p.rows, n), np.nan, "float32") for n in (p.channels, p.value_heads * p.value_size)]
        inputs = [np.asarray(each, "float32") for each in (x, weights)]
        *_, states, mixed = run(
            convolution_kernel(replace(p, is_convolution=True)), [*inputs, *rows, states, poison[0]], on_gpu
        )
        np.testing.assert_allclose(mixed, expected.convolved(x, weights, sequences), atol=1e-5)
        inputs = [np.asarray(each, "float32") for each in (mixed, beta, alpha, a, dt)]
        *_, states, results = run(delta_rule_kernel(p), [*inputs, *rows, states, poison[1]], on_gpu)
        np.testing.assert_allclose(
            results, expected.updated(mixed.astype("float64"), beta, alpha, a, dt, sequences), atol=1e-5
        )
