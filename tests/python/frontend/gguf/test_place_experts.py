"""Experts dealt over devices by cost and by counts: plans fit, and the most frequent experts are on the fastest one."""

import json
from itertools import product

import numpy as np
import pytest

import relax_hetero as rh
from frontend.plan_problems import links
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.frontend import CostModel, DeviceCost
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.place_experts import ExpertLayer, place_experts, read_expert_counts
from relax_hetero.frontend.gguf.place_layers import LayerProblem
from relax_hetero.frontend.gguf.plan_layers import LayerPlan
from relax_hetero.frontend.paged_cache import PagedCache
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.transform.ir.remarks import remarks_of

SPEEDS = [DeviceCost(1e12, 1e9, 0), DeviceCost(1e12, 1e10, 0), DeviceCost(1e12, 4e9, 0)]
EXPERT, DENSE = 100, 1000
"""Bytes of an expert, and of all else."""


def costs_of(count, latency=1e-9):
    return CostModel(SPEEDS[:count], links(count, latency, 1e12, latency), 0)


def layer(number, pairs, count):
    seconds = tuple(EXPERT / cost.bandwidth for cost in SPEEDS[:count])
    return ExpertLayer(number, (EXPERT,) * count, seconds, tuple(pairs))


def dense_of(count):
    return [(DENSE, DENSE / cost.bandwidth) for cost in SPEEDS[:count]]


def test_the_most_frequent_experts_are_on_the_fastest_device():
    layers = [layer(0, [0.1, 0.9, 0.5, 0.5], 2), layer(1, [0.8, 0.2, 0.3, 0.7], 2)]
    plan = place_experts(layers, costs_of(2), {1: DENSE + 4 * EXPERT}, dense_of(2), 4)
    assert plan.home == 1
    assert plan.devices == {0: (0, 1, 1, 0), 1: (1, 0, 0, 1)}  # of equal ones the first
    on_cpu = 0.1 + 0.5 + 0.2 + 0.3
    assert plan.busy_seconds[0] == pytest.approx(on_cpu * EXPERT / 1e9)
    assert plan.busy_seconds[1] == pytest.approx((DENSE + (4 - on_cpu) * EXPERT) / 1e10)
    assert plan.resident_bytes == (4 * EXPERT, DENSE + 4 * EXPERT)
    [(first, device, reason), *_] = plan.rules(["llvm:0", "cuda:0"], plan.limits)
    assert (first, device) == ("blk.0.ffn_*_exps[0,3]", "llvm:0")
    assert "the memory of cuda:0 is too small: 2 of 4 experts with 30% of the expected choices" in reason
    assert f"of the limit of {DENSE + 4 * EXPERT:,} bytes on cuda:0 other work leaves 0, and 100 are needed" in reason
    assert plan.rules(["llvm:0", "cuda:0"], plan.limits)[-1][:2] == ("*", "cuda:0")


def test_equally_frequent_experts_fill_layer_after_layer():
    """So few layers need transfers; with slow links, this is better than a choice by frequency."""
    layers = [layer(number, [0.5] * 4, 2) for number in range(3)]
    plan = place_experts(layers, costs_of(2), {1: DENSE + 6 * EXPERT}, dense_of(2), 4)
    assert plan.devices == {0: (1,) * 4, 1: (1, 1, 0, 0), 2: (0,) * 4}
    layers = [layer(number, [0.4, 0.5, 0.6, 0.5], 2) for number in range(3)]
    plan = place_experts(layers, costs_of(2, 1.0), {1: DENSE + 8 * EXPERT}, dense_of(2), 4)
    assert plan.devices == {0: (1,) * 4, 1: (1,) * 4, 2: (0,) * 4}


def test_three_devices_are_filled_from_the_fastest_to_the_slowest():
    generator = np.random.default_rng(0)
    layers = [layer(number, generator.permutation(8) / 8, 3) for number in range(4)]
    plan = place_experts(layers, costs_of(3), {1: DENSE + 10 * EXPERT, 2: 9 * EXPERT}, dense_of(3), 4)
    assert plan.order == (1, 2, 0) and plan.home == 1
    pairs = {device: [] for device in range(3)}
    for each, expert in product(layers, range(8)):
        pairs[plan.devices[each.layer][expert]].append(each.pairs[expert])
    assert [len(pairs[device]) for device in (1, 2, 0)] == [10, 9, 13]
    assert min(pairs[1]) >= max(pairs[2]) and min(pairs[2]) >= max(pairs[0])


def test_no_plan_where_memory_is_too_small():
    layers = [layer(0, [0.5] * 4, 2)]
    assert place_experts(layers, costs_of(2), {0: 3 * EXPERT, 1: DENSE - 1}, dense_of(2), 4) is None


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("experts") / "model.gguf", MODELS["qwen3moe"], {"*": "Q4_K"})


def test_counts_choose_the_experts_of_a_small_gpu(path, tmp_path):
    """In a file and in a mapping: experts that most tokens chose are on the GPU."""
    counts = {0: [9, 0, 0, 8, 7, 0, 0, 0], 1: [0, 0, 0, 0, 0, 9, 8, 7]}
    source = tmp_path / "counts.json"
    source.write_text(json.dumps({"expert_counts": counts}))
    file = read_gguf(path)
    devices = ["llvm", {"kind": "cuda", "arch": "sm_90a"}]
    cache = PagedCache(chunks=(16,), context=64)
    problem = LayerProblem(file, hyperparameters_of(file), cache, parse_vdevices(devices), costs_of(2), {})
    sizes = [(part.name, part.resident_bytes[1]) for part in problem.search.parts]
    experts = sum(size for name, size in sizes if name == "experts")
    limits = {"cuda": int(sum(size for _, size in sizes) - 0.55 * experts) + problem.working[1]}
    options = {"chunks": (16,), "context": 64, "memory_limit": limits, "cost_model": costs_of(2)}
    mods = [rh.from_gguf(file, devices, "auto", expert_counts=each, **options) for each in (counts, source)]
    for mod in mods:
        entries = [entry for entry in remarks_of(mod).placement.entries if entry.kind == "op"]
        on_gpu = {entry.variable for entry in entries if entry.device == "cuda:0"}
        assert {"blk.0.ffn_up_exps.cuda_0", "blk.1.ffn_up_exps.cuda_0", "blk.0.attn", "output"} <= on_gpu
        estimate = remarks_of(mod).placement_estimate
        assert estimate["seconds"] < estimate["single_device_seconds"]["llvm:0"] / 5
        [reason] = {entry.reason for entry in entries if entry.variable == "blk.1.ffn_up_exps.llvm_0"}
        assert reason.startswith("auto, the memory of cuda:0 is too small: ") and "with 0% of the expected" in reason


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({7: [1] * 8}, "expert_counts: has counts of layer 7, which has no experts"),
        ({0: [1] * 7}, "for layer 0, expected a number of at least 0 for each of 8 experts"),
        ({0: [-1] * 8}, "expected a number of at least 0"),
        ({0: np.full(8, np.nan)}, "expected a number of at least 0"),
        ({0: 5}, "found 5 for layer 0, expected a number of at least 0"),
        ({"one": [1] * 8}, "found 'one', expected the number of a layer"),
        ([[1] * 8], "expert_counts: found list, expected a file, or a mapping from layers to a number"),
        ("{}", "is not a file of expert counts: KeyError.*--count-experts wrote"),
        ("[", "is not a file of expert counts"),
        (None, "cannot be read: No such file"),
    ],
)
def test_wrong_counts(source, message, path, tmp_path):
    if not isinstance(source, (dict, list)):
        file = tmp_path / "counts.json"
        if source is not None:
            file.write_text(source)
        source = file
    with pytest.raises(rh.FrontendError, match=message):
        read_expert_counts(source, hyperparameters_of(read_gguf(path)))


def test_rows_of_counts_may_be_arrays(path):
    """And layers strings, as in a file."""
    model = hyperparameters_of(read_gguf(path))
    source = {0: np.arange(8), "1": np.ones(8, "float32"), np.int64(1): [1] * 8}
    assert read_expert_counts(source, model) == {0: tuple(map(float, range(8))), 1: (1.0,) * 8}


def test_plans_without_a_split_layer_are_those_of_layers(path):
    """All experts of a layer on one device are for `PlanSearch`, which also moves other parts."""
    file, vdevices = read_gguf(path), parse_vdevices(["llvm", "llvm"])
    problem = LayerProblem(file, hyperparameters_of(file), PagedCache(context=64), vdevices, costs_of(2), {})
    assert isinstance(problem.best(), LayerPlan)
    experts = [part.resident_bytes[1] for part in problem.search.parts if part.name == "experts"]
    rest = problem.search.plan([1] * len(problem.search.parts)).resident_bytes[1] - sum(experts)
    limits = {1: int(rest + experts[0]) + problem.working[1] + 64}
    assert isinstance(problem.best(limits), LayerPlan)


def test_counts_need_automatic_placement(path):
    with pytest.raises(rh.FrontendError, match='expert_counts are for placement="auto"'):
        rh.from_gguf(path, ["llvm"], expert_counts={})
