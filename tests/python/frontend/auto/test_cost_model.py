"""Device figures that the cost model derives from targets."""

import pytest

from relax_hetero.frontend import CostModel
from relax_hetero.frontend.auto import cost_model
from relax_hetero.target.vdevice import VDevice, parse_vdevices

GPU = {"kind": "cuda", "arch": "sm_90"}


def test_defaults_know_vector_widths_and_cores():
    targets = [
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 4},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 4},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 8},
        GPU,
        {"kind": "cuda", "arch": "sm_75"},
        "vulkan",
    ]
    flops = [device.flops for device in CostModel.for_vdevices(parse_vdevices(targets)).devices]
    assert flops[1] == 4 * flops[0] and flops[2] == 2 * flops[1]
    assert flops[3] > flops[4] > flops[2]
    assert flops[5] > 0


def test_without_a_cpu_the_host_is_implicit():
    model = CostModel.for_vdevices(parse_vdevices([GPU]))
    assert model.host == -1
    assert model.transfer_seconds(1e6, -1, 0) > 1e-5


def cpu(cores, index=None):
    target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": cores}
    return target if index is None else VDevice(target, index)


def of_cores(vdevices, objective="latency"):
    """The model, and the cores with which each CPU device works in it."""
    model = CostModel.for_vdevices(parse_vdevices(vdevices), objective)
    one = CostModel.for_vdevices(parse_vdevices([cpu(1)])).devices[0]
    return model, [device.flops / one.flops for device in model.devices]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(cost_model, "num_cores", lambda: 8)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_devices_with_cores_of_their_own_work_side_by_side(objective):
    model, cores = of_cores([cpu(4), cpu(4)], objective)
    assert cores == [4, 4] and model.queues == [0, 1]
    assert model.transfer_seconds(1e9, 0, 1) < 1e-3  # nothing is copied


def test_devices_that_share_cores_take_turns_in_one_call():
    model, cores = of_cores([cpu(8), cpu(8), GPU])
    assert cores[:2] == [8, 8] and model.queues == [0, 0, 1]
    assert model.transfer_seconds(1e9, 0, 1) > 1e-2  # a copy


@pytest.mark.parametrize(
    ("own", "share"), [([8, 8], [4, 4]), ([8, 1], [4, 1]), ([8, 8, 8], [2, 2, 2]), ([5, 4], [4, 4])]
)
def test_devices_that_share_cores_have_a_share_with_calls_in_flight(own, share):
    model, cores = of_cores(list(map(cpu, own)), "throughput")
    assert cores == share and model.queues == list(range(len(own)))


def test_a_device_of_more_cores_than_there_are_is_another_machines():
    model, cores = of_cores([cpu(16), cpu(16)], "throughput")
    assert cores == [16, 16] and model.queues == [0, 1]


def test_a_target_that_says_nothing_of_cores_has_one():
    target = cpu(1)
    del target["num-cores"]
    _, cores = of_cores([target])
    assert cores == [1]


def test_vdevices_of_one_physical_device_take_turns():
    model, cores = of_cores([cpu(2, 0), cpu(4, 0), cpu(1, 1), GPU, GPU], "throughput")
    assert cores[:3] == [4, 4, 1] and model.queues == [0, 0, 1, 2, 3]


def test_cpu_devices_share_the_bandwidth_of_their_socket(monkeypatch):
    monkeypatch.setattr(cost_model, "num_cores", lambda: 64)
    single = CostModel.for_vdevices(parse_vdevices([cpu(64)])).devices[0]
    beside = CostModel.for_vdevices(parse_vdevices([cpu(32), cpu(32)])).devices
    assert beside[0].bandwidth == beside[1].bandwidth == single.bandwidth / 2
