"""Experts of a CPU that long chunks multiply on a GPU: which chunks, what is shared, and the memory of copies.

The last layer multiplies one row of a chunk, on the CPU.
"""

import logging
from dataclasses import replace

import pytest
from tvm import relax

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.errors import FrontendError
from relax_hetero.frontend import CostModel
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings

CPU, GPU = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 16}, {"kind": "cuda", "arch": "sm_90a"}
RULES = {"blk.*.ffn_*_exps*": "llvm", "*": "cuda"}


@pytest.fixture
def model(tmp_path):
    """A function that writes a mixture and imports it, with experts on the CPU."""

    def write(stream_experts, layers=3, kind="Q4_K", vdevices=(CPU, GPU), rules=RULES, **options):
        sizes = replace(MODELS["qwen3moe"], layers=layers)
        path = write_gguf(tmp_path / "model.gguf", sizes, {"*_exps*": kind, "*": "Q8_0"})
        return rh.from_gguf(path, vdevices, rules, chunks=(16, 64), stream_experts=stream_experts, **options)

    return write


def copies(mod):
    """Number of copies of experts in each function."""
    functions = {gv.name_hint: func for gv, func in mod.functions.items() if isinstance(func, relax.Function)}
    counts = {
        name: sum(op_name(binding.value) == "relax.hetero.stream" for binding in walk_bindings(func))
        for name, func in functions.items()
    }
    return {name: count for name, count in counts.items() if count}


def test_only_long_chunks_copy(model):
    assert copies(model(64)) == {"prefill_64": 6}
    assert copies(model(1)) == {"prefill_16": 6, "prefill_64": 6}
    assert copies(model(64, rules={"blk.*.ffn_*": "llvm", "*": "cuda"})) == {"prefill_64": 6}
    assert copies(model(64, all_logits=True)) == copies(model(64, count_experts=True)) == {"prefill_64": 9}
    assert copies(model(65)) == copies(model(0)) == copies(model(None)) == {}


def test_products_are_on_the_gpu_and_weights_on_the_cpu(model):
    mod = model(64)
    types = {binding.var.name: binding.var.ty for binding in walk_bindings(mod["prefill_64"])}
    kinds = {name: ty.vdevice.target.kind.name for name, ty in types.items() if isinstance(ty, relax.TensorType)}
    assert kinds["blk.1.ffn_up_exps.dequantized"] == "llvm"
    assert kinds["blk.1.ffn_up_exps.streamed"] == kinds["blk.1.ffn_sum_exps.streamed"] == "cuda"
    reasons = {entry.variable: entry.reason for entry in remarks_of(mod).placement.entries}
    assert reasons["blk.1.ffn_up_exps.streamed"] == "chunks of 64 rows or more copy experts from llvm:0"


def test_only_experts_of_the_cpu_are_copied(model):
    mod = model(64, rules={"blk.1.ffn_*_exps[0-5]": "llvm", "*": "cuda"})
    names = [b.var.name for b in walk_bindings(mod["prefill_64"]) if op_name(b.value) == "relax.hetero.stream"]
    assert names == [f"blk.1.ffn_{part}_exps.llvm_0.streamed.copy" for part in ("gate", "up", "down")]


@pytest.mark.slow
def test_weights_are_shared_and_copies_take_turns(model):
    """One copy in the host's memory, and on the GPU memory for the copies of a layer."""

    def plans(stream_experts, layers):
        mod = model(stream_experts, layers)
        donated = [f"pages_{layer}" for layer in range(layers)]
        names = ("decode_1", "prefill_16", "prefill_64")
        plan = rh.compile(mod, donate=dict.fromkeys(names, donated)).memory_plan
        return plan.at("prefill_64", **dict.fromkeys(plan.symbolic_dims("prefill_64"), 8)).devices

    (cpu, gpu), (plain_cpu, _), (_, deeper_gpu) = plans(64, 3), plans(0, 3), plans(64, 5)
    assert cpu.weights <= plain_cpu.weights
    assert gpu.transient == deeper_gpu.transient


@pytest.mark.parametrize("name", ["F32", "Q4_0"])
def test_formats_without_a_kernel_and_other_devices(model, name, caplog):
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        assert bool(copies(model(64, kind=name))) == (name != "F32")
    assert ("no kernel for copies of type F32" in caplog.text) == (name == "F32")
    two = [CPU, {"kind": "llvm", "mcpu": "x86-64-v3"}]
    assert copies(model(64, kind=name, vdevices=two, rules={"*_exps*": "llvm:0", "*": "llvm:1"})) == {}
    assert copies(model(64, kind=name, rules={"*": "cuda"})) == copies(model(64, kind=name, rules={"*": "llvm"})) == {}
    assert copies(model(64, kind=name, vdevices=None, rules=None)) == {}
    apart = [rh.VDevice(CPU, host="a"), rh.VDevice(GPU, host="b")]
    assert copies(model(64, kind=name, vdevices=apart, rules={"*_exps*": apart[0], "*": apart[1]})) == {}


def test_chunks_by_the_cost_model(model, monkeypatch):
    costs = CostModel.for_vdevices(parse_vdevices([CPU, GPU]))
    slow = replace(costs.devices[0], products=dict.fromkeys(costs.devices[0].products, 1e9))
    for cpu, bandwidth, expected in (
        (slow, 1e12, {"prefill_16": 6, "prefill_64": 6}),
        (slow, 2e7, {"prefill_64": 6}),
        (costs.devices[0], 1e6, {}),
    ):
        links = {ends: replace(link, bandwidth=bandwidth) for ends, link in costs.links.items()}
        figures = replace(costs, devices=[cpu, costs.devices[1]], links=links)
        monkeypatch.setattr(CostModel, "measured", lambda _, may_measure, figures=figures: figures)
        assert copies(model("auto")) == expected


@pytest.mark.parametrize("value", [-1, True, "always", 2.5])
def test_refused(model, value):
    with pytest.raises(FrontendError, match='expected a number of rows, 0 or None for never, or "auto"'):
        model(value)
