"""Providers name devices."""

import pytest

from relax_hetero.compat import devices
from relax_hetero.compat.devices import normalized, vdevices_of

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(devices, "get_available_providers", lambda: [CUDA, CPU])


def test_device_ids(with_gpu):
    chosen = normalized([(CUDA, {"device_id": 1})], None)
    assert chosen == {CUDA: {"device_id": "1"}, CPU: {}}
    assert vdevices_of(chosen, 0) == ["cuda:1", "llvm"]
    assert normalized([CPU, CUDA], [{}, {"device_id": "0"}]) == {CPU: {}, CUDA: {"device_id": "0"}}
    assert list(normalized(None, None)) == [CUDA, CPU]
    assert devices.get_device() == "GPU"


def test_options_of_providers_are_said(with_gpu):
    with pytest.warns(UserWarning, match="'gpu_mem_limit' of CUDAExecutionProvider has no effect"):
        vdevices_of({CUDA: {"gpu_mem_limit": "1"}}, 0)


def test_other_providers_are_warned_of():
    with pytest.warns(UserWarning, match="Specified provider 'TensorrtExecutionProvider' is not in available"):
        assert normalized(["TensorrtExecutionProvider", CPU], None) == {CPU: {}}
    with pytest.warns(UserWarning, match="Duplicate"):
        normalized([CPU, CPU], None)


def test_threads_are_cores_of_the_target():
    (target,) = vdevices_of({CPU: {}}, 3)
    assert target.attrs["num-cores"] == 3


@pytest.mark.parametrize(("providers", "options"), [(CPU, None), ([1], None), ([CPU], [{}, {}])])
def test_wrong_arguments(providers, options):
    with pytest.raises(ValueError, match="providers"):
        normalized(providers, options)
