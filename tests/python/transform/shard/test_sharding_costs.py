"""Estimates of products over a mesh: small ones stay whole, annotations win, and `explain` says why."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from free_exchanges import FreeExchanges
from modules import calls_of, ir_module, ops_of
from relax_hetero import providers
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS, partition_by_mesh
from transform.shard.test_gpu_sums import GPUS

CORES = ({"kind": "llvm", "num-cores": 1}, ({"kind": "llvm", "num-cores": 1}, 1))


def weight(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def two_products(devices, rows, width):
    """Two products, the second with the rows of its weight along the columns of the first."""
    up, down, mesh = weight(width, width), weight(width, width), "cuda[0:2]" if devices is GPUS else "llvm[0:2]"

    @ir_module(*devices)
    def module(x: R.Tensor((rows, width), "float32", mesh)):
        with R.dataflow():
            y = R.matmul(R.nn.relu(R.matmul(x, R.const(up))), R.const(down))
            z = R.nn.softmax(y)
            R.output(z)
        return z

    return module


def widths(module):
    """Columns of each product."""
    return [int(call.ty.shape.values[-1]) for call in calls_of("relax.matmul", partition_by_mesh(module))]


# The exchange of small products takes longer than they do; one of a CPU's queue longer than that of GPUs.
@pytest.mark.parametrize(
    ("devices", "rows", "width", "is_split"),
    [(GPUS, 64, 64, False), (GPUS, 2048, 4096, True), (CORES, 64, 64, False), (CORES, 128, 1024, True)],
)
def test_only_products_that_are_worth_an_exchange_are_split(devices, rows, width, is_split):
    module = two_products(devices, rows, width)
    expected = [width // 2, width // 2, width, width] if is_split else [width, width]
    assert widths(module) == expected  # whole products of the second device are not used
    assert widths(module) == widths(module)


def test_a_split_counts_what_later_products_save():
    up, down = weight(8, 1024), weight(1024, 1024)

    @ir_module(*CORES)
    def alone(x: R.Tensor((128, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.matmul(x, R.const(up))
            R.output(y)
        return y

    @ir_module(*CORES)
    def both(x: R.Tensor((128, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.matmul(R.matmul(x, R.const(up)), R.const(down))
            R.output(y)
        return y

    assert widths(alone) == [1024]
    assert widths(both) == [512, 512, 1024, 1024]


def test_all_products_are_split_without_estimates():
    after = partition_by_mesh(two_products(GPUS, 64, 64), by_cost=False)
    assert ops_of(after).count("relax.matmul") == 4


def test_rows_or_a_gathered_operand():
    """The sum of a wide result takes longer than the exchange of a narrow operand."""
    up, out = weight(512, 64), weight(64, 32000)

    @ir_module(*GPUS)
    def module(x: R.Tensor((512, 512), "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.hetero.shard(R.matmul(x, R.const(up)), "S[1]")
            y = R.matmul(R.max(R.reshape(h, (512, 64, 1)), axis=[-1]), R.const(out))
            z: R.Tensor((512, 32000), "float32", "cuda[0:2]") = R.nn.softmax(y)
            R.output(z)
        return z

    products = calls_of("relax.matmul", partition_by_mesh(module))
    assert [int(call.args[0].ty.shape.values[-1]) for call in products] == [512, 512, 64]


@pytest.mark.parametrize("asks", ["result", "operand"])
def test_annotations_win(asks):
    up, down = weight(8, 16), weight(16, 8)

    @ir_module(*CORES)
    def result(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.hetero.shard(R.nn.relu(R.matmul(x, R.const(up))), "S[1]")
            z = R.matmul(y, R.const(down))
            R.output(z)
        return z

    @ir_module(*CORES)
    def operand(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.matmul(R.hetero.shard(x, "S[1]"), R.const(up))
            R.output(y)
        return y

    products = calls_of("relax.matmul", partition_by_mesh({"result": result, "operand": operand}[asks]))
    assert len(products) == (4 if asks == "result" else 2)
    parts = [[int(extent) for extent in call.args[1].ty.shape.values] for call in products]
    assert parts == ([[8, 8], [8, 8], [8, 8], [8, 8]] if asks == "result" else [[4, 16], [4, 16]])


@pytest.mark.parametrize(
    ("width", "reasons"), [(1024, ["columns split: saves about", "rows split: about"]), (64, ["whole on each device"])]
)
def test_reasons_are_explained(width, reasons):
    """They follow the reason of the device."""
    entries = rh.compile(two_products(CORES, 128, width)).metadata.placement
    given = {entry["reason"].partition("; ")[2] for entry in entries if entry["op"] == "relax.matmul"}
    assert given
    assert all(any(text.startswith(reason) for reason in reasons) for text in given), given
    assert all(any(text.startswith(reason) for text in given) for reason in reasons), given


@pytest.mark.parametrize("rows", [256, "n"])
def test_functions_follow_the_splits_of_those_with_more_work(rows):
    """Otherwise the same weight would be stored whole for one, and in parts for the other."""
    up, down = relax.const(weight(384, 384)), relax.const(weight(384, 384))

    @I.ir_module
    class Module:
        I.module_global_infos({"vdevice": [I.vdevice(*CORES[0:1], 0), I.vdevice(*CORES[1])]})

        @R.function
        def step(x: R.Tensor((1, 384), "float32", "llvm[0:2]")):
            with R.dataflow():
                z = R.matmul(R.nn.relu(R.matmul(x, up)), down)
                R.output(z)
            return z

        @R.function
        def prefill(x: R.Tensor((rows, 384), "float32", "llvm[0:2]")):
            with R.dataflow():
                z = R.matmul(R.nn.relu(R.matmul(x, up)), down)
                R.output(z)
            return z

    alone = partition_by_mesh(tvm.IRModule({"step": Module["step"]}, global_infos=Module.global_infos))
    assert ops_of(alone).count("relax.matmul") == 2, "its own estimate is against the split"
    after = partition_by_mesh(Module)
    assert [gv.name_hint for gv in after.functions] == ["step", "prefill"]
    parts = [tuple(map(int, call.args[1].ty.shape.values)) for call in calls_of("relax.matmul", after)]
    assert parts == [(384, 192), (384, 192), (192, 384), (192, 384)] * 2


class SlowLink(FreeExchanges):
    """Costs of a mesh with a link that is slow for large values."""

    def transfer_seconds(self, size, _source, _destination):
        return 1e-5 * size


def short_and_long(build):
    """A module of a function for one row and one for 256."""
    short, long = build(1), build(256)
    return tvm.IRModule({"step": short["main"], "prefill": long["main"]}, global_infos=long.global_infos)


def weights_of(module, name):
    calls = calls_of("relax.matmul", partition_by_mesh(module)[name])
    return [tuple(map(int, call.args[1].ty.shape.values)) for call in calls]


@pytest.fixture
def _slow_link(monkeypatch):
    monkeypatch.setitem(providers._providers, "device_costs", (__name__, "SlowLink"))


@pytest.mark.usefixtures("_slow_link")
def test_functions_follow_those_that_do_not_split():
    up, down = relax.const(weight(384, 384)), relax.const(weight(384, 384))

    def build(rows):
        @ir_module(*CORES)
        def module(x: R.Tensor((rows, 384), "float32", "llvm[0:2]")):
            with R.dataflow():
                z = R.matmul(R.nn.relu(R.matmul(x, up)), down)
                R.output(z)
            return z

        return module

    assert weights_of(build(1), "main") == [(384, 192), (384, 192), (192, 384), (192, 384)], "alone it is split"
    both = short_and_long(build)
    assert weights_of(both, "prefill") == weights_of(both, "step") == [(384, 384)] * 2
    reasons = {entry["function"]: entry["reason"] for entry in rh.compile(both).metadata.placement}
    assert reasons["step"].endswith("as another function stores the weight")


@pytest.mark.usefixtures("_slow_link")
def test_functions_follow_those_that_split_columns_of_a_gathered_operand():
    """The operand's split would allow one of the rows, too, which would store the weight again."""
    up, down = relax.const(weight(384, 64)), relax.const(weight(64, 12800))
    parts = {"z": {"placement": "S[1]", "names": ["z", "z@1"], "mesh": [0, 1]}}

    def build(rows):
        @ir_module(*CORES)
        def module(x: R.Tensor((rows, 384), "float32", "llvm[0:2]")):
            with R.dataflow():
                y = R.max(R.reshape(R.hetero.shard(R.matmul(x, up), "S[1]"), (rows, 64, 1)), axis=[-1])
                z = R.matmul(y, down)
                R.output(z)
            return z

        attributes = {SPLIT_PARAMETERS: json.dumps(parts), "output_names": ["z"]}
        module.update_func(module.get_global_var("main"), module["main"].with_attrs(attributes))
        return module

    both = short_and_long(build)
    assert weights_of(both, "prefill") == weights_of(both, "step") == [(384, 32)] * 2 + [(64, 6400)] * 2


def test_a_result_that_the_caller_takes_in_parts_is_computed_in_parts():
    """Such as logits: there is no exchange."""
    head = weight(8, 16)

    @ir_module(*CORES)
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            logits = R.matmul(x, R.const(head))
            R.output(logits)
        return logits

    parts = {"logits": {"placement": "S[1]", "names": ["logits", "logits@1"], "mesh": [0, 1]}}
    attributes = {SPLIT_PARAMETERS: json.dumps(parts), "output_names": ["logits"]}
    module.update_func(module.get_global_var("main"), module["main"].with_attrs(attributes))
    after = partition_by_mesh(module)
    assert [int(call.ty.shape.values[1]) for call in calls_of("relax.matmul", after)] == [8, 8]
    assert "relax.strided_slice" not in ops_of(after)
