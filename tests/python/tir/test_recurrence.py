"""Kernels of recurrent layers against float64: ops, directions, ragged sizes, ended sequences, few and many cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.tir.recurrence import GATES, PANEL_COLUMNS, RecurrenceProblem, recurrence_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, cpu_named, in_double, kernel, poisoned

SIGMOID, TANH, CLIPPED = "sigmoid(x0)", "tanh(x0)", "tanh(clip(x0, -0.5, 0.5))"
DEFAULTS = {"RNN": (TANH,), "GRU": (SIGMOID, TANH), "LSTM": (SIGMOID, TANH, TANH)}


def problem(op, sizes, backwards, *, activations=None, symbolic=False, **options):
    steps, batch, hidden = sizes
    extents = ("s0", "s1") if symbolic else (steps, batch)
    return RecurrenceProblem(
        op, *extents, hidden, backwards, activations or (DEFAULTS[op],) * len(backwards), **options
    )


def random_operands(layer, sizes):
    """Operands by name, the recurrent weights not packed, and the sizes of results."""
    rng, (steps, batch, hidden) = fresh_rng(), sizes
    extents = {"s0": steps, "s1": batch}
    arrays, shapes = {}, {}
    for name, operand in layer.operands.items():
        shape = tuple(extents.get(size, size) for size in operand.layout.packed_shape(operand.shape))
        shapes[name] = shape
        arrays[name] = rng.uniform(-1, 1, shape).astype("float32")
    weights = rng.standard_normal((layer.directions, GATES[layer.op], hidden, hidden)) * hidden**-0.5
    arrays["weights"] = weights.astype("float32")
    arrays["lengths"] = rng.integers(0, steps + 1, batch)
    return arrays, shapes


def packed(weights):
    """[directions, gates, columns, hidden] in panels."""
    directions, gates, columns, hidden = weights.shape
    panels = np.pad(weights, ((0, 0), (0, 0), (0, -columns % PANEL_COLUMNS), (0, 0)))
    panels = panels.reshape(directions, gates, -1, PANEL_COLUMNS, hidden).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(panels).reshape(directions, -1, hidden, gates * PANEL_COLUMNS)


def reference(layer, arrays):
    wide = {name: array.astype("float64") for name, array in arrays.items()}
    steps, batch, _ = wide["inputs"].shape
    inputs = wide["inputs"].reshape(steps, batch, layer.directions, GATES[layer.op], layer.hidden)
    outputs, finals = np.zeros((steps, layer.directions, batch, layer.hidden)), {}
    for d, is_backwards in enumerate(layer.backwards):
        h, c = wide["initial_hidden"][d], wide.get("initial_cell", wide["initial_hidden"])[d]
        act = [lambda x, text=text: in_double(Expression.parse(text), [x]) for text in layer.activations[d]]
        for t in range(steps)[:: -1 if is_backwards else 1]:
            x, w = inputs[t, :, d].transpose(1, 0, 2), wide["weights"][d]
            p = [h @ weight.T for weight in w]
            if layer.op == "RNN":
                new = act[0](x[0] + p[0]), c
            elif layer.op == "GRU":
                z, r = act[0](x[0] + p[0]), act[0](x[1] + p[1])
                inner = (r * h) @ w[2].T
                if layer.linear_before_reset:
                    inner = r * (p[2] + (wide["bias"][d] if layer.has_bias else 0))
                new = (1 - z) * act[1](x[2] + inner) + z * h, c
            else:
                peepholes = wide["peepholes"][d] if layer.has_peepholes else np.zeros((3, layer.hidden))
                i, o, f, g = x + np.stack(p)
                i = act[0](i + peepholes[0] * c)
                f = 1 - i if layer.input_forget else act[0](f + peepholes[2] * c)
                cell = f * c + i * act[1](g)
                new = act[0](o + peepholes[1] * cell) * act[2](cell), cell
            is_active = (arrays["lengths"] > t)[:, None] if layer.has_lengths else np.ones((batch, 1), bool)
            outputs[t, d] = np.where(is_active, new[0], 0)
            h, c = np.where(is_active, new[0], h), np.where(is_active, new[1], c)
        finals.setdefault("hidden", []).append(h)
        finals.setdefault("cell", []).append(c)
    return {"outputs": outputs, **{name: np.stack(values) for name, values in finals.items()}}


def check(layer, sizes, name, folder, cores=1):
    cpu = replace(cpu_named(name), cores=cores)
    arrays, shapes = random_operands(layer, sizes)
    first = 0
    for phase, gates in enumerate(layer.phases):
        arrays[f"weights{phase}"] = packed(arrays["weights"][:, first : first + gates])
        first += gates
    want = reference(layer, arrays)
    results = ("outputs", "hidden", "cell", "factors", "sums")
    tensors = {
        name: poisoned(shape, "float32") if name in results else tvm.runtime.tensor(arrays[name])
        for name, shape in shapes.items()
    }
    kernel(recurrence_kernel(layer, cpu), name, folder)(*tensors.values())
    for result in want.keys() & tensors.keys():
        np.testing.assert_allclose(tensors[result].numpy(), want[result], rtol=1e-4, atol=2e-6, err_msg=result)


BOTH, LENGTHS = (False, True), {"has_lengths": True}
LAYERS = {
    "lstm": ("LSTM", (5, 3, 19), BOTH, {"has_peepholes": True, **LENGTHS}),
    "coupled": ("LSTM", (4, 9, 16), (True,), {"input_forget": True, "activations": ((SIGMOID, CLIPPED, TANH),)}),
    "gru": ("GRU", (5, 2, 33), BOTH, LENGTHS),
    "symbolic": ("GRU", (3, 7, 8), (False,), {"linear_before_reset": True, "has_bias": True, "symbolic": True}),
    "rnn": ("RNN", (4, 1, 40), BOTH, {"activations": ((TANH,), (CLIPPED,)), "symbolic": True}),
    "empty": ("RNN", (0, 2, 5), (False,), {}),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", LAYERS)
def test_ops_and_directions(layer, name, tmp_path):
    op, sizes, backwards, options = LAYERS[layer]
    check(problem(op, sizes, backwards, **options), sizes, name, tmp_path)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize(("op", "sizes"), [("GRU", (2, 5, 300)), ("LSTM", (3, 13, 250)), ("LSTM", (3, 20, 24))])
@pytest.mark.parametrize("backwards", [(False,), BOTH])
@pytest.mark.parametrize("symbolic", [False, True])
def test_cores_share_rows_and_columns(op, sizes, backwards, symbolic, cores, tmp_path):
    check(problem(op, sizes, backwards, symbolic=symbolic), sizes, NAMES[0], tmp_path, cores)
