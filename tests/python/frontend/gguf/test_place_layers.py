"""`placement="auto"` of a language model: plans fit the limits of devices, and are the fastest of those that do."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from frontend.plan_problems import links
from llm import architecture_models
from llm.gguf_files import FOUR_BITS, MODELS, QWEN3_30B, write_gguf
from llm.test_encoder import file_of
from relax_hetero.encoding.block_panels import BlockSource, Panels, block_format
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.frontend import CostModel, DeviceCost, LinkCost
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.part_costs import Part, Step, crossings
from relax_hetero.frontend.gguf.place_layers import LayerProblem, bytes_on, resident_bytes
from relax_hetero.frontend.gguf.plan_layers import PlanSearch
from relax_hetero.frontend.paged_cache import PagedCache
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.vm.device.tensors import nbytes_of

GPU = {"kind": "cuda", "arch": "sm_90a"}
# Layers that share a cache, and those with a state.
OTHERS = {name: architecture_models.MODELS[name] for name in ("qwen35", "qwen3next", "gemma3n", "gemma4", "gemma4-moe")}
# The second device is ten times as fast, the third a little faster than the first.
SPEEDS = [DeviceCost(1e9, 1e9, 0), DeviceCost(1e10, 1e10, 0), DeviceCost(2e9, 2e9, 0)]


def costs_of(count, latency=1e-6):
    return CostModel(SPEEDS[:count], links(count, 0, 1e9, latency), 0)


@st.composite
def searches(draw, count, max_layers=4):
    """Parts of a few layers, with sizes of their own on each device; experts read a little of what they hold."""
    sizes = st.tuples(*[st.integers(1, 50)] * count).map(lambda found: tuple(100.0 * size for size in found))
    is_tied = draw(st.booleans())
    table = draw(sizes)
    shared = tuple(draw(st.booleans()) and is_tied for _ in range(count))
    parts = [Part("embd", 0, table, (0.0,) * count, shared=shared)]
    for layer in range(draw(st.integers(1, max_layers))):
        for name in ("attn", "ffn", *(["experts"] if draw(st.booleans()) else [])):
            size = draw(sizes)
            parts.append(Part(name, layer, size, size, 0.1 if name == "experts" else 1.0))
    output = table if is_tied else draw(sizes)
    # From transfers that take no time to some that take longer than a part.
    costs = costs_of(count, draw(st.sampled_from([0.0, 1e-7, 1e-6, 1e-5])))
    return PlanSearch([*parts, Part("output", 0, output, output)], costs, 400, Step(1, 0))


def draw_limits(data, search, low, high):
    """Limits of some of the devices, as fractions of what all parts take there."""
    devices = range(len(search.costs.devices))
    return {
        device: data.draw(st.floats(low, high)) * bytes_on(search.parts, device)
        for device in data.draw(st.sets(st.sampled_from(devices)))
    }


def fits(plan, limits):
    return all(plan.resident_bytes.get(device, 0.0) <= limit for device, limit in limits.items())


@pytest.mark.parametrize(("count", "max_layers"), [(2, 3), (3, 2)])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_plan_that_fits_is_faster(count, max_layers, data):
    """Than the plan that is found, among all assignments of parts to devices."""
    search = data.draw(searches(count, max_layers))
    limits = draw_limits(data, search, 0.1, 1.2)
    plan = search.best(limits)
    plans = map(search.plan, itertools.product(range(count), repeat=len(search.parts)))
    fastest = min((other.seconds for other in plans if fits(other, limits)), default=None)
    if fastest is None:
        assert plan is None
        return
    assert fits(plan, limits)
    assert plan.seconds == pytest.approx(fastest)
    assert plan == search.plan(plan.devices)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_fastest_plan_by_limit_is_that_of_the_limit(data):
    search = data.draw(searches(2))
    sizes = [share * bytes_on(search.parts, 1) for share in (0.0, 0.2, 0.5, 0.9, 1.0)]
    found = search.fastest_by_limit(1, sizes, {0: 1e9})
    for size, seconds in zip(sizes, found, strict=True):
        plan = search.best({0: 1e9, 1: size})
        assert seconds == pytest.approx(plan.seconds)


def test_bytes_that_embeddings_and_output_share_count_once():
    parts = [
        Part("embd", 0, (10.0, 10.0), (0.0, 0.0), shared=(True, False)),
        Part("output", 0, (10.0, 10.0), (1.0, 1.0)),
    ]
    search = PlanSearch(parts, costs_of(2), 400, Step(1, 0))
    assert [search.plan(devices).resident_bytes for devices in ((0, 0), (1, 1), (0, 1))] == [
        {0: 10.0},
        {1: 20.0},
        {0: 10.0, 1: 10.0},
    ]


def test_experts_return_their_result():
    """The rest of a layer adds it: a row goes there and back."""
    parts = [Part(name, 0, (0.0, 0.0), (0.0, 0.0)) for name in ("embd", "attn", "ffn", "experts", "attn", "output")]
    found = crossings(parts, (0, 1, 1, 0, 1, 1), 0)
    assert [ends for *ends, _ in found] == [[0, 1], [1, 0], [0, 1]]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Qwen 3 30B-A3B in 4 bits, without its numbers."""
    return write_gguf(tmp_path_factory.mktemp("large") / "model.gguf", QWEN3_30B, FOUR_BITS, sparse=True)


@pytest.mark.parametrize("latency", [5e-6, 30e-6])
def test_plans_of_a_large_mixture_are_those_found_by_hand(large, latency):
    """Experts, feed-forward networks or whole layers of any number of last layers on the GPU."""
    file = read_gguf(large)
    vdevices = parse_vdevices(["llvm", GPU])
    costs = CostModel.for_vdevices(vdevices)
    link = LinkCost(20e9, latency)
    costs = replace(costs, links={(0, 1): link, (1, 0): link})
    cache = PagedCache((1, 8), (32, 256), None, 4096)
    problem = LayerProblem(file, hyperparameters_of(file), cache, vdevices, costs, {})
    search = problem.search
    hand = []
    for first, table in itertools.product(range(49), (0, 1)):
        late = [part.name != "embd" and part.layer >= first for part in search.parts]
        names = [part.name for part in search.parts]
        for rest in (0, 1):
            for moved in (("experts",), ("router", "experts"), ("attn", "router", "experts")):
                devices = [int(is_late) if name in moved else rest for name, is_late in zip(names, late, strict=True)]
                hand.append(search.plan((table, *devices[1:-1], 1)))
    for limit in (8 << 30, 16 << 30, 24 << 30, 48 << 30):
        limits = problem.free({1: limit})
        plan = search.best(limits)
        assert fits(plan, limits)
        assert plan.seconds <= 1.001 * min(other.seconds for other in hand if fits(other, limits))


@pytest.mark.parametrize("count", [2, 4])
def test_a_plan_that_barely_fits_several_gpus_is_found(large, count):
    """Embeddings on the CPU, and consecutive layers on GPUs, with a hundredth of their memory for what is left over."""
    file = read_gguf(large)
    vdevices = parse_vdevices(["llvm", *[GPU] * count])
    cache = PagedCache((1, 8), (32, 256), None, 4096)
    problem = LayerProblem(file, hyperparameters_of(file), cache, vdevices, CostModel.for_vdevices(vdevices), {})
    parts = problem.search.parts
    table = parts[0].resident_bytes[0]
    layer = sum(part.resident_bytes[1] for part in parts if part.layer == 1)
    limits = {0: table, **dict.fromkeys(range(1, count + 1), 1.01 * 48 / count * layer)}
    plan = problem.search.best({**limits, count: limits[count] + parts[-1].resident_bytes[1]})
    assert plan is not None and plan.devices[0] == 0 and set(plan.devices[1:]) == set(range(1, count + 1))


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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4"])
def test_an_executable_for_a_gpu_holds_the_estimated_bytes(kind, tmp_path):
    """In addition to the tensors: tables and layouts of routers, a few KB."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", replace(MODELS["qwen3moe"], layers=1), {"*": kind}))
    executable = rh.compile(rh.from_gguf(file, [GPU], chunks=(16,), context=256))
    held = sum(map(nbytes_of, executable.constants))
    weights = sum(resident_bytes(tensor, Fragments()) for tensor in file.tensors.values())
    assert weights <= held <= weights + (32 << 10)
    in_file = sum(tensor.data.nbytes for tensor in file.tensors.values())
    assert held <= 1.05 * in_file


@pytest.mark.slow
def test_embeddings_that_are_the_output_are_stored_once(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "model.gguf", replace(MODELS["llama-tied"], layers=1), {"*": "Q4_K"}))
    executable = rh.compile(rh.from_gguf(file, [GPU], chunks=(16,), context=256))
    held = sum(map(nbytes_of, executable.constants))
    weights = sum(resident_bytes(tensor, Fragments()) for tensor in file.tensors.values())
    assert weights <= held <= weights + (32 << 10)
    problem = LayerProblem(file, hyperparameters_of(file), PagedCache(), parse_vdevices([GPU]), costs_of(1), {})
    assert problem.search.parts[0].shared == (True,)


def devices_of(function):
    """Kinds of devices by the variables of products."""
    return {
        binding.var.name: str(binding.var.ty.vdevice.target.kind.name)
        for binding in walk_bindings(function)
        if isinstance(binding.var.ty, tvm.relax.TensorType)
    }


def rows_of_products(function, full_layers):
    """Rows of the products of layers that take all rows of a chunk, up to the attention of a layer, and of the rest."""
    rows = set()
    for binding in walk_bindings(function):
        match = re.fullmatch(r"blk\.(\d+)\.(ffn_.*|attn_(?:output|q|qkv))", binding.var.name)
        if match and op_name(binding.value) == "relax.matmul":
            layer, is_after = int(match[1]), not match[2].startswith("attn_q")
            rows.add(("all" if layer + is_after <= full_layers else "one", int(binding.var.ty.shape.values[0])))
    return rows


@pytest.mark.parametrize("all_logits", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_every_architecture_is_placed(name, all_logits, tmp_path):
    """Under limits that leave room for a little more than a half on each device."""
    file = read_gguf(file_of(tmp_path, name, OTHERS) if name in OTHERS else write_gguf(tmp_path / "gguf", MODELS[name]))
    cache = PagedCache(chunks=(16,), context=256, all_logits=all_logits)
    problem = LayerProblem(file, hyperparameters_of(file), cache, parse_vdevices(["llvm", GPU]), costs_of(2), {})
    limits = {
        kind: int(0.7 * bytes_on(problem.search.parts, at)) + problem.working[at]
        for at, kind in enumerate(("llvm", "cuda"))
    }
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
    rows = rows_of_products(mod["prefill_16"], hyperparameters_of(file).full_layers(all_logits))
    assert rows == {("all", 16)} | (set() if all_logits else {("one", 1)})
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
    cache = PagedCache(chunks=(16,), context=256)
    problem = LayerProblem(file, hyperparameters_of(file), cache, parse_vdevices(["llvm", GPU]), costs_of(2), {})
    parts = problem.search.parts
    limit = sum(part.resident_bytes[1] for part in parts if part.name != "experts") + problem.working[1] + 1
    plan = problem.search.best(problem.free({1: limit}))
    assert [device for part, device in zip(parts, plan.devices, strict=True) if part.name == "experts"] == [0, 0]
    assert {device for part, device in zip(parts, plan.devices, strict=True) if part.name in ("attn", "router")} == {1}
    limits = {"cuda": int(limit)}
    mod = rh.from_gguf(
        file, ["llvm", GPU], "auto", chunks=(16,), context=256, cost_model=costs_of(2), memory_limit=limits
    )
    devices = devices_of(mod["decode_1"])
    assert {devices[f"blk.{layer}.ffn_{part}_exps"] for layer in (0, 1) for part in ("gate", "up", "down")} == {"llvm"}
    assert {devices[f"blk.0.ffn_{value}_exps"] for value in ("in", "par", "down", "weighted", "sum")} == {"llvm"}
    on_gpu = ("blk.0.attn_qkv", "blk.1.attn_output", "blk.0.ffn_gate_inp", "blk.0.ffn_moe_weights", "output")
    assert {devices[name] for name in on_gpu} == {"cuda"}
    findings = remarks_of(mod)
    reasons = {entry.variable: entry.reason for entry in findings.placement.entries if entry.kind == "op"}
    assert reasons["blk.0.attn_qkv"].startswith("auto, no device is faster: ")
    assert reasons["blk.1.ffn_up_exps"].startswith("auto, the memory of cuda:0 is too small: ")
    assert findings.placement_estimate["seconds"] == plan.seconds and not any(
        "rule" in text for text in reasons.values()
    )


def test_a_cost_model_of_other_devices_is_refused(experts):
    with pytest.raises(rh.VDeviceError, match="the cost model has 2 devices for 3 vdevices"):
        rh.from_gguf(experts, ["llvm"] * 3, "auto", context=256, cost_model=costs_of(2))


def test_a_layer_that_fits_nowhere_is_refused_by_name(experts):
    with pytest.raises(
        rh.PlacementError, match=r"no split by layers or by parts .* on llvm:1, where the limit is 1,024"
    ):
        rh.from_gguf(experts, ["llvm", "llvm"], "auto", context=256, cost_model=costs_of(2), memory_limit="1KiB")
