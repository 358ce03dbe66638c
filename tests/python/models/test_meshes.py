"""Whole models over meshes of CPU devices of one core, with random shardings of some values, against ONNX Runtime."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from models.running import expected_outputs, outputs_of
from models.zoo import inputs_of, random_model
from modules import calls_of
from relax_hetero.target.vdevice import lookup, parse_vdevices, with_vdevices
from relax_hetero.transform.ir.blocks import renamed, shape_of
from seeds import fresh_rng

BENCH = Path(__file__).parents[3] / "apps" / "bench"
CORE = {"kind": "llvm", "num-cores": 1}


def from_bench(module, name):
    """A name of a module of the benchmarks."""
    sys.path.insert(0, str(BENCH))
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove(str(BENCH))


def small_transformer(graph):
    """Attention as in GPT-2 (a norm before, Split, a mask), then a feed-forward network as in BERT (a norm after)."""
    width, heads, size = 32, 4, (2, 8, 4, 8)
    x = graph.input("x", (2, 8, width))
    joined = graph.linear(graph.layer_norm(x, width), width, 3 * width)
    parts = graph.node("Split", joined, graph.shape(width, width, width), outputs=3, axis=2)
    q, k, v = (graph.node("Reshape", value, graph.shape(*size)) for value in parts)
    q, v = (graph.node("Transpose", value, perm=[0, 2, 1, 3]) for value in (q, v))
    scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 2, 3, 1]))
    scores = graph.node("Mul", scores, graph.constant(heads**-0.5))
    below = graph.constant(np.tril(np.ones((1, 1, 8, 8), "bool")), "bool")
    scores = graph.node("Where", below, scores, graph.constant(-1e4))
    context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
    merged = graph.node("Reshape", graph.node("Transpose", context, perm=[0, 2, 1, 3]), graph.shape(2, 8, width))
    x = graph.node("Add", graph.linear(merged, width, width), x)
    y = graph.linear(graph.gelu(graph.linear(x, width, 4 * width)), 4 * width, width)
    x = graph.decomposed_layer_norm(graph.node("Add", y, x), width)
    return graph.model(graph.linear(x, width, 50))


def small_resnet(graph):
    """Two bottlenecks, the second with a stride, and a classifier."""
    x = graph.node("Relu", graph.conv(graph.input("image", (2, 3, 16, 16)), 16, 3, stride=2, pad=1))
    for stride in (1, 2):
        y = graph.node("Relu", graph.conv(x, 8, 1, pad=0))
        y = graph.node("Relu", graph.conv(y, 8, 3, stride=stride, pad=1))
        shortcut = graph.conv(x, 16, 1, stride=stride, pad=0)
        x = graph.node("Relu", graph.node("Add", graph.conv(y, 16, 1, pad=0), shortcut))
    return graph.model(graph.linear(graph.node("Flatten", graph.node("GlobalAveragePool", x)), 16, 12))


SMALL = {"small_transformer": small_transformer, "small_resnet": small_resnet}


@functools.cache
def case(name):
    if name in SMALL:
        model = SMALL[name](from_bench("model_zoo.graph", "Graph")(name))
    else:
        model = random_model(name) if name == "resnet50" else from_bench("model_zoo", "BY_NAME")[name]()
    inputs = {name: array % 50 if array.dtype == np.int64 else array for name, array in inputs_of(model).items()}
    return model, inputs, expected_outputs(model, inputs)


def check(name, mod):
    _, inputs, expected = case(name)
    executable = rh.compile(mod)
    for actual, reference in zip(outputs_of(executable, inputs), expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)
    return executable


def mesh_name(shape):
    return f"llvm[0:{math.prod(shape)}]({', '.join(map(str, shape))})"


def randomly_sharded(mod, mesh_shape, generator, probability=1 / 8):
    """The module over a mesh, some of whose values have a random sharding."""
    vdevices = parse_vdevices([CORE] * math.prod(mesh_shape))
    mesh = lookup(mesh_name(mesh_shape), vdevices)
    func, names, blocks = mod["main"], {}, []
    for block in func.body.blocks:
        bindings = []
        for binding in block.bindings:
            value = renamed(binding, names).value
            var = type(binding.var)(binding.var.name, _on(binding.var.ty, mesh))
            if isinstance(value, relax.Call):
                value = relax.Call(value.op, value.args, value.attrs, value.ty_args, ret_ty=var.ty)
            bindings.append(relax.VarBinding(var, value))
            names[binding.var] = var
            placement = random_placement(shape_of(binding.var) or [], mesh_shape, generator)
            if isinstance(var, relax.DataflowVar) and "S" in placement and generator.random() < probability:
                call = rh.op.shard(var, placement)
                sharded = relax.DataflowVar(f"{var.name}_sharded", var.ty)
                relax.expr._update_type(call, var.ty)
                bindings.append(relax.VarBinding(sharded, call))
                names[binding.var] = sharded
        blocks.append(type(block)(bindings))
    body = func.body.body
    is_tuple = isinstance(body, relax.Tuple)
    result = relax.Tuple([names.get(field, field) for field in body.fields]) if is_tuple else names.get(body, body)
    out = with_vdevices(mod, vdevices)
    out["main"] = relax.Function(list(func.params), relax.SeqExpr(blocks, result), result.ty, attrs=func.attrs)
    return out


def random_placement(shape, mesh_shape, generator):
    left, placements = [int(extent) for extent in shape], []
    for count in mesh_shape:
        axis = generator.choice([axis for axis, extent in enumerate(left) if extent % count == 0] or [-1])
        is_split = axis >= 0 and (len(mesh_shape) == 1 or generator.random() < 0.7)
        placements.append(f"S[{axis}]" if is_split else "R")
        left = [extent // count if is_split and i == axis else extent for i, extent in enumerate(left)]
    return ", ".join(placements)


def _on(ty, mesh):
    if isinstance(ty, relax.TensorType):
        return relax.TensorType(ty.shape, ty.dtype, mesh)
    return type(ty)([_on(field, mesh) for field in ty.fields]) if hasattr(ty, "fields") else ty


@pytest.mark.usefixtures("free_exchanges")
@pytest.mark.parametrize("name", SMALL)
def test_data_and_tensor_parallel(name):
    """Over 2 x 2 devices: each pair has its part of the batch, and adds its sums."""
    executable = check(name, rh.from_onnx(case(name)[0], CORE, data_parallel=2, tensor_parallel=2))
    assert {region.device for region in executable.metadata.regions} == {0, 1, 2, 3}


@pytest.mark.usefixtures("free_exchanges")
@pytest.mark.parametrize("name", SMALL)
def test_any_sharding_of_a_small_model(name):
    mod, generator = rh.from_onnx(case(name)[0]), fresh_rng()
    check(name, randomly_sharded(mod, (2, 2), generator, 1 / 4))


MESHES = [(2,), (4,), (2, 2)]


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_a_model_over_a_mesh(name, mesh_shape):
    devices = math.prod(mesh_shape)
    executable = check(name, rh.from_onnx(case(name)[0], [CORE] * devices, {"*": mesh_name(mesh_shape)}))
    assert {region.device for region in executable.metadata.regions} == set(range(devices))


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parts", "sharing"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_batches_over_a_mesh(name, parts, sharing):
    """Without devices that share a part, values cross only at the ends."""
    model = from_bench("model_zoo.batches", "with_batch")(case(name)[0], 4)
    inputs = {key: np.concatenate([np.roll(array, i, -1) for i in range(4)]) for key, array in case(name)[1].items()}
    mod = rh.from_onnx(model, CORE, data_parallel=parts, tensor_parallel=sharing)
    ends = (parts - 1) * (len(inputs) + len(model.graph.output))
    assert sharing > 1 or len(calls_of("relax.to_vdevice", mod)) == ends
    for actual, reference in zip(outputs_of(rh.compile(mod), inputs), expected_outputs(model, inputs), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_any_sharding_of_a_model(name, mesh_shape):
    check(name, randomly_sharded(rh.from_onnx(case(name)[0]), mesh_shape, fresh_rng()))
