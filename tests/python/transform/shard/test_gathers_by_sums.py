"""Small values of GPUs are gathered as sums of parts among zeros, inside of CUDA graphs."""

import json

import numpy as np
import pytest
from tvm.script import relax as R

from modules import calls_of, ir_module, ops_of
from relax_hetero.transform.shard.exchanges import Exchanges
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS, partition_by_mesh
from seeds import fresh_rng
from transform.interpreting import run
from transform.shard.test_gpu_sums import GPUS


def gathered(columns, dtype="float32"):
    """A value of which both GPUs return the whole."""

    @ir_module(*GPUS)
    def module(x: R.Tensor((4, columns), dtype, "cuda[0:2]")):
        with R.dataflow():
            a = R.hetero.shard(x, "S[1]")
            b = R.nn.relu(a)
            R.output(b)
        return b

    copies = {"b": {"placement": "R", "names": ["b", "b@1"], "mesh": [0, 1]}}
    attributes = {SPLIT_PARAMETERS: json.dumps(copies), "output_names": ["b"]}
    module.update_func(module.get_global_var("main"), module["main"].with_attrs(attributes))
    return partition_by_mesh(module)


def test_gpus_gather_small_values_by_kernels():
    after = gathered(6)
    assert list(after["main"].attrs["output_names"]) == ["b", "b@1"]
    pads = calls_of("relax.nn.pad", after)
    assert [[int(width) for width in call.attrs.pad_width] for call in pads] == [[0, 0, 0, 3], [0, 0, 3, 0]]
    kernels = [call for call in calls_of("relax.call_tir", after) if "all_reduce" in call.args[0].name_hint]
    shapes = [[int(extent) for extent in call.ty.shape.values] for call in kernels]
    assert shapes == [[4, 6]] * 4  # a function's only sum is computed twice
    assert ops_of(after).count("relax.to_vdevice") == 1  # the argument


@pytest.mark.parametrize(("columns", "dtype"), [(6, "int32"), (40_000, "float32")])
def test_other_values_are_copied(columns, dtype):
    """Other types, and more than 512 KB."""
    after = gathered(columns, dtype)
    assert not calls_of("relax.nn.pad", after) and not calls_of("relax.call_tir", after)
    assert ops_of(after).count("relax.concat") == 2


@pytest.mark.parametrize("devices", [2, 4])
def test_sums_of_parts_among_zeros_are_the_whole(devices, monkeypatch):
    """One segment of the axis, and three."""
    monkeypatch.setattr(Exchanges, "_sums_gather", lambda self, group: True)
    values = fresh_rng().standard_normal((4, 24)).astype("float32")
    values[1, 5] = np.nan

    @ir_module("llvm", *[("llvm", index) for index in range(1, devices)])
    def module(x: R.Tensor((4, 24), "float32", f"llvm[0:{devices}]")):
        with R.dataflow():
            a = R.hetero.shard(x, "S[1]")
            b = R.concat((a, R.nn.relu(a), a), axis=1)
            c = R.hetero.shard(R.nn.softmax(R.hetero.shard(a, "R"), axis=1), "S[1]")
            d = R.hetero.shard(R.nn.softmax(R.hetero.shard(b, "R"), axis=1), "S[1]")
            R.output(c, d)
        return (c, d)

    after = partition_by_mesh(module)
    assert len(calls_of("relax.nn.pad", after)) == devices * (1 + 3)
    for actual, expected in zip(run(after, values), run(module, values), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
