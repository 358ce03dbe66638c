"""`placement="auto"` of a language model: plans fit the limits of devices, and are the fastest of those that do."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from frontend.plan_problems import links
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.encoding.block_panels import BlockSource, Panels, block_format
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.frontend import CostModel, DeviceCost
from relax_hetero.frontend.from_gguf import hyperparameters_of
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.place_layers import Part, best_plan, bytes_on, parts_of, resident_bytes
from relax_hetero.frontend.paged_cache import PagedCache
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.vm.device.tensors import nbytes_of

# The second device is ten times as fast, the third a little faster than the first.
SPEEDS = [DeviceCost(1e9, 1e9, 0), DeviceCost(1e9, 1e10, 0), DeviceCost(1e9, 2e9, 0)]


def costs_of(count):
    return CostModel(SPEEDS[:count], links(count, 0, 1e9, 1e-6), 0)


@st.composite
def models(draw, count):
    """Parts of a few layers, with sizes of their own on each device; experts read a little of what they hold."""
    sizes = st.tuples(*[st.integers(1, 50)] * count).map(lambda found: tuple(100.0 * size for size in found))
    is_tied = draw(st.booleans())
    table = draw(sizes)
    parts = [Part("embd", 0, table, (0.0,) * count, tuple(draw(st.booleans()) and is_tied for _ in range(count)))]
    for layer in range(draw(st.integers(1, 4))):
        share = draw(st.sampled_from([1.0, 0.1]))
        for name, part in (("attn", draw(sizes)), ("ffn", draw(sizes))):
            read = tuple(size * (share if name == "ffn" else 1.0) for size in part)
            parts.append(Part(name, layer, part, read))
    output = table if is_tied else draw(sizes)
    return [*parts, Part("output", 0, output, output)]


@pytest.mark.parametrize("count", [2, 3])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_plans_fit_and_no_device_alone_is_faster(count, data):
    parts = data.draw(models(count))
    limits = {
        device: int(data.draw(st.floats(0.1, 1.2)) * bytes_on(parts, device))
        for device in data.draw(st.sets(st.integers(0, count - 1)))
    }
    costs = costs_of(count)
    plan = best_plan(parts, costs, limits, 400)
    fitting = [device for device in range(count) if bytes_on(parts, device) <= limits.get(device, math.inf)]
    if plan is None:
        assert not fitting
        return
    assert len(plan.devices) == len(parts)
    for device in set(plan.devices):
        used = sum(part.resident_bytes[device] for part, own in zip(parts, plan.devices, strict=True) if own == device)
        shared = parts[0].shared[device] and plan.devices[0] == plan.devices[-1] == device
        assert plan.resident_bytes[device] == pytest.approx(used - shared * parts[0].resident_bytes[device])
        assert plan.resident_bytes[device] <= limits.get(device, math.inf)
    for device in fitting:
        seconds = sum(part.read[device] / costs.devices[device].bandwidth for part in parts)
        assert plan.seconds <= seconds + 4e-6


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_over_two_devices_that_fits_is_found(data):
    parts = data.draw(models(2))
    limits = {device: int(data.draw(st.floats(0.2, 0.9)) * bytes_on(parts, device)) for device in (0, 1)}
    plan = best_plan(parts, costs_of(2), limits, 400)
    cuts = [index for index, part in enumerate(parts) if part.name in ("attn", "output")]
    for order, cut in itertools.product([(0, 1), (1, 0)], cuts):
        devices = [order[index >= cut] for index in range(len(parts))]
        resident = [
            sum(part.resident_bytes[device] for part, own in zip(parts, devices, strict=True) if own == device)
            for device in (0, 1)
        ]
        if all(resident[device] <= limits[device] for device in (0, 1)):
            assert plan is not None


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("experts") / "model.gguf", MODELS["qwen3moe"], {"*": "Q4_K"})


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1", "Q6_K"])
def test_bytes_are_those_that_devices_hold(kind, tmp_path):
    file = read_gguf(write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], {"*": kind}))
    matrix, experts = file.tensors["blk.0.attn_q.weight"], file.tensors["blk.0.ffn_up_exps.weight"]
    if kind == "F32":
        assert resident_bytes(matrix, Panels(32)) == 4 * np.prod(matrix.shape)
        assert resident_bytes(matrix, Fragments()) == 2 * np.prod(matrix.shape)
        assert resident_bytes(experts, Fragments()) == 2 * np.prod(experts.shape)
        return
    form = block_format(kind.lower())
    for tensor in (matrix, experts):
        rows = np.ascontiguousarray(tensor.data).view("uint8").reshape(int(np.prod(tensor.shape[:-1])), -1)
        source = BlockSource((rows,), form, tensor.shape[-1])
        packed = Panels(32).pack(source, int(np.prod(tensor.shape[:-2])))
        assert resident_bytes(tensor, Panels(32)) == sum(array.nbytes for array in packed)
        assert resident_bytes(tensor, None) == 4 * np.prod(tensor.shape)
        packed_bytes = sum(array.nbytes for array in Fragments().pack(source, int(np.prod(tensor.shape[:-2]))))
        assert resident_bytes(tensor, Fragments()) == packed_bytes


GPU = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4"])
def test_an_executable_for_a_gpu_holds_the_estimated_bytes(kind, tmp_path):
    """In addition to the tensors: tables and layouts of routers, a few KB."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", replace(MODELS["qwen3moe"], layers=1), {"*": kind}))
    executable = rh.compile(rh.from_gguf(file, [GPU], chunks=(16,), context=256))
    held = sum(map(nbytes_of, executable.constants))
    cache = PagedCache(chunks=(16,), context=256)
    parts = parts_of(file, hyperparameters_of(file), cache, [Fragments()])
    weights = sum(resident_bytes(tensor, Fragments()) for tensor in file.tensors.values())
    pages = bytes_on(parts, 0) - weights
    assert pages > 0 and weights <= held <= weights + (32 << 10)
    in_file = sum(tensor.data.nbytes for tensor in file.tensors.values())
    assert held <= 1.05 * in_file


def test_embeddings_that_are_the_output_are_stored_once(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "model.gguf", replace(MODELS["llama-tied"], layers=1), {"*": "Q4_K"}))
    executable = rh.compile(rh.from_gguf(file, [GPU], chunks=(16,), context=256))
    held = sum(map(nbytes_of, executable.constants))
    weights = sum(resident_bytes(tensor, Fragments()) for tensor in file.tensors.values())
    assert weights <= held <= weights + (32 << 10)
    parts = parts_of(file, hyperparameters_of(file), PagedCache(), [Fragments()])
    assert parts[0].shared == (True,)


def devices_of(function):
    """Kinds of devices by the variables of products."""
    return {
        binding.var.name: str(binding.var.ty.vdevice.target.kind.name)
        for binding in walk_bindings(function)
        if isinstance(binding.var.ty, tvm.relax.TensorType)
    }


@pytest.mark.parametrize("all_logits", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_placed(name, all_logits, tmp_path):
    """Under limits that leave room for a little more than a half on each device."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", MODELS[name]))
    cache = PagedCache(chunks=(16,), context=256, all_logits=all_logits)
    parts = parts_of(file, hyperparameters_of(file), cache, [Panels(32), Fragments()])
    limits = {kind: int(0.65 * bytes_on(parts, at)) for at, kind in enumerate(("llvm", "cuda"))}
    mod = rh.from_gguf(
        file,
        ["llvm", GPU],
        "auto",
        chunks=(16,),
        context=256,
        all_logits=all_logits,
        cost_model=costs_of(2),
        memory_limit=limits,
    )
    for function in ("decode_1", "prefill_16"):
        assert set(devices_of(mod[function]).values()) == {"llvm", "cuda"}
    reasons = [entry.reason for entry in remarks_of(mod).placement.entries]
    faster = "cuda" if any("the memory of cuda:0 is too small" in reason for reason in reasons) else "llvm"
    assert any(f"of the limit of {limits[faster]:,} bytes on {faster}:0 other work leaves" in text for text in reasons)


def test_keys_that_are_values_are_placed_on_a_gpu(tmp_path):
    """Matrices of heads of 16-bit floats stay so on GPUs."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["deepseek2"], {"*attn_k_b*": "F16", "*": "Q8_0"})
    file = read_gguf(path)
    tensor = file.tensors["blk.0.attn_k_b.weight"]
    assert resident_bytes(tensor, Fragments()) == 2 * math.prod(tensor.shape)
    mod = rh.from_gguf(file, ["llvm", GPU], "auto", chunks=(16,), context=256, cost_model=costs_of(2))
    entries = [entry for entry in remarks_of(mod).placement.entries if entry.reason.startswith("auto")]
    assert {entry.device for entry in entries if ".attn" in entry.variable} == {"cuda:0"}


def test_experts_stay_on_the_cpu_where_they_do_not_fit_the_gpu(experts):
    """A token reads few of the experts, so that they are what a small GPU gains the least from."""
    file = read_gguf(experts)
    model, cache = hyperparameters_of(file), PagedCache(context=256)
    parts = parts_of(file, model, cache, [Panels(32), Fragments()])
    limit = sum(part.resident_bytes[1] for part in parts if part.name != "ffn")
    plan = best_plan(parts, costs_of(2), {1: int(limit) + 1}, model.hidden_size * 4)
    assert [device for part, device in zip(parts, plan.devices, strict=True) if part.name == "ffn"] == [0, 0]
    assert {device for part, device in zip(parts, plan.devices, strict=True) if part.name == "attn"} == {1}
    limits = {"cuda": int(limit) + 1}
    mod = rh.from_gguf(
        file, ["llvm", GPU], "auto", chunks=(16,), context=256, cost_model=costs_of(2), memory_limit=limits
    )
    devices = devices_of(mod["decode_1"])
    assert {devices[f"blk.{layer}.ffn_{part}_exps"] for layer in (0, 1) for part in ("gate", "up", "down")} == {"llvm"}
    assert {devices["blk.0.attn_qkv"], devices["blk.1.attn_output"], devices["output"]} == {"cuda"}
    findings = remarks_of(mod)
    reasons = {entry.variable: entry.reason for entry in findings.placement.entries if entry.kind == "op"}
    assert reasons["blk.0.attn_qkv"].startswith("auto, no device is faster: ")
    assert reasons["blk.1.ffn_up_exps"].startswith("auto, the memory of cuda:0 is too small: ")
    assert findings.placement_estimate["seconds"] == plan.seconds and not any(
        "rule" in text for text in reasons.values()
    )


def test_a_layer_that_fits_nowhere_is_refused_by_name(experts):
    with pytest.raises(
        rh.PlacementError, match=r"no split by layers or by parts .* on llvm:1, where the limit is 1,024"
    ):
        rh.from_gguf(experts, ["llvm", "llvm"], "auto", context=256, cost_model=costs_of(2), memory_limit="1KiB")
