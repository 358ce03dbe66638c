"""Scatters of GPUs, through the passes, by the interpreter: updates for one element come in their order."""

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.tir.cuda.loops import cuda_scatter
from seeds import fresh_rng

HOPPER = rh.VDevice({"kind": "cuda", "arch": "sm_90a"})
COMBINE = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": min,
    "max": max,
}


def model(data, indices, updates, dtype, axis, reduction, symbolic):
    n = tvm.tirx.Var("n", "int64")
    types = [(data, dtype), (indices, "int64"), (updates, dtype)]
    shapes = [[n, *shape[1:]] if symbolic and number else shape for number, (shape, _) in enumerate(types)]
    params = [
        relax.Var(name, relax.TensorType(shape, kind))
        for name, shape, (_, kind) in zip("diu", shapes, types, strict=True)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            if axis is None:
                y = relax.op.scatter_nd(*params, reduction)
            else:
                y = relax.op.scatter_elements(*params, axis, reduction)
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return with_vdevices(builder.get(), [HOPPER])


def scattered(data, indices, updates, axis, reduction):
    result = data.copy()
    for place in np.ndindex(*(indices.shape[:-1] if axis is None else updates.shape)):
        target = tuple(indices[place]) if axis is None else (*place[:axis], indices[place], *place[axis + 1 :])
        old, new = np.broadcast_arrays(result[target], updates[place])
        values = [COMBINE[reduction](*pair) for pair in zip(old.reshape(-1), new.reshape(-1), strict=True)]
        result[target] = np.array(values).reshape(old.shape)
    return result


@pytest.mark.parametrize(
    "data, indices, updates, dtype, axis, reduction, symbolic, kernels",
    [
        ((10, 6), (4, 1), (4, 6), "float32", None, "update", False, 2),
        pytest.param((10, 6), (5, 1), (5, 6), "float32", None, "add", True, 2, marks=pytest.mark.slow),
        ((10, 6), (30, 2), (30,), "float32", None, "update", False, 4),  # sorted
        ((7, 6, 3), (40, 2), (40, 3), "float16", None, "max", False, 4),
        pytest.param((10, 6, 2), (4, 5, 2), (4, 5, 2), "float16", 1, "add", False, 2, marks=pytest.mark.slow),
        pytest.param((30,), (40,), (40,), "int32", 0, "mul", False, 4, marks=pytest.mark.slow),
        ((5, 7), (5, 20), (5, 20), "int64", 1, "min", False, 4),
        ((30, 7), (30, 7), (30, 7), "float32", 1, "update", True, 2),
    ],
)
def test_scatters(data, indices, updates, dtype, axis, reduction, symbolic, kernels, monkeypatch):
    monkeypatch.setattr(cuda_scatter, "MAX_IN_ORDER", 16)
    rng = fresh_rng()
    x, new = rng.integers(-5, 5, data).astype(dtype), rng.integers(-3, 4, updates).astype(dtype)
    if axis is None:
        where = np.stack([rng.integers(0, extent, indices[:-1]) for extent in data[: indices[-1]]], -1)
    else:
        where = rng.integers(-data[axis], data[axis], indices)
    interpreted = InterpretedModel(model(data, indices, updates, dtype, axis, reduction, symbolic))
    np.testing.assert_array_equal(interpreted(x, where, new), scattered(x, where, new, axis, reduction))
    assert len([name for name in interpreted.launched if name.startswith("scatter")]) == kernels


@pytest.mark.slow
def test_launches_over_one_tensor_are_one_graph():
    exe = rh.compile(model((10, 6), (4, 1), (4, 6), "float32", None, "update", False))
    assert [(region.runs, len(region.commands)) for region in exe.metadata.regions] == [("CUDA graph", 3)]
    assert not exe.metadata.single_calls
