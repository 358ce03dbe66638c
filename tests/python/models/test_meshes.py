"""Whole models over meshes of CPU devices of one core, with random shardings of some values, against ONNX Runtime."""

from __future__ import annotations

import functools
import importlib
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


@functools.cache
def case(name):
    model = random_model(name) if name == "resnet50" else from_bench("model_zoo", "BY_NAME")[name]()
    inputs = {name: array % 50 if array.dtype == np.int64 else array for name, array in inputs_of(model).items()}
    return model, inputs, expected_outputs(model, inputs)


def check(name, mod):
    _, inputs, expected = case(name)
    executable = rh.compile(mod)
    for actual, reference in zip(outputs_of(executable, inputs), expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)
    return executable


def randomly_sharded(mod, devices, generator):
    """The module over a mesh, one in eight of whose values has a random sharding."""
    vdevices = parse_vdevices([CORE] * devices)
    mesh = lookup(f"llvm[0:{devices}]", vdevices)
    func, names, blocks = mod["main"], {}, []
    for block in func.body.blocks:
        bindings = []
        for binding in block.bindings:
            value = renamed(binding, names).value
            var = type(binding.var)(binding.var.name, _on(binding.var.ty, mesh))
            if isinstance(value, relax.Call):
                value = relax.Call(value.op, value.args, value.attrs, value.ty_args, ret_ty=var.ty)
            bindings.append(relax.VarBinding(var, value))
            axes = [axis for axis, extent in enumerate(shape_of(binding.var) or []) if int(extent) % devices == 0]
            names[binding.var] = var
            if axes and isinstance(var, relax.DataflowVar) and generator.random() < 1 / 8:
                call = rh.op.shard(var, f"S[{generator.choice(axes)}]")
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


def _on(ty, mesh):
    if isinstance(ty, relax.TensorType):
        return relax.TensorType(ty.shape, ty.dtype, mesh)
    return type(ty)([_on(field, mesh) for field in ty.fields]) if hasattr(ty, "fields") else ty


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_a_model_over_a_mesh(name, devices):
    executable = check(name, rh.from_onnx(case(name)[0], [CORE] * devices, {"*": f"llvm[0:{devices}]"}))
    assert {region.device for region in executable.metadata.regions} == set(range(devices))


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_batches_over_a_mesh(name, devices):
    """Values cross between devices only at the ends."""
    model = from_bench("model_zoo.batches", "with_batch")(case(name)[0], 4)
    inputs = {key: np.concatenate([np.roll(array, i, -1) for i in range(4)]) for key, array in case(name)[1].items()}
    mod = rh.from_onnx(model, CORE, data_parallel=devices)
    assert len(calls_of("relax.to_vdevice", mod)) == (devices - 1) * (len(inputs) + len(model.graph.output))
    for actual, reference in zip(outputs_of(rh.compile(mod), inputs), expected_outputs(model, inputs), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)


@pytest.mark.slow  # compiles a model of 100 MB for each case
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_any_sharding_of_a_model(name, devices):
    check(name, randomly_sharded(rh.from_onnx(case(name)[0]), devices, fresh_rng()))
