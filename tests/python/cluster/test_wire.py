"""Values as they travel: every element type, and those too large for a channel."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_hetero.cluster import wire
from relax_hetero.vm.device.tensors import bytes_of, from_numpy

HOST = tvm.runtime.device("cpu", 0)


def _sent(value: object) -> object:
    """A value as it arrives: from read-only memory, as Ray gives it."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(wire.encode(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "int4"],
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 5)])
def test_tensors_arrive_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).integers(0, 7, shape)
    array = numbers.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
    tensor = from_numpy(np.asarray(array), HOST)
    for value in (tensor, array):
        arrived = wire.decode_copy(_sent(value))
        assert isinstance(arrived, tvm_ffi.core.Tensor)
        assert (str(arrived.dtype), tuple(arrived.shape)) == (dtype, shape)
        assert np.array_equal(bytes_of(arrived), bytes_of(tensor))


def test_tensors_on_this_host_are_not_copied() -> None:
    tensor = from_numpy(np.ones(100, "float32"), HOST)
    assert np.shares_memory(wire.encode(tensor), bytes_of(tensor))
    array = np.ones((3, 4), "float32")
    assert np.shares_memory(wire.encode(array), array)
    assert not np.shares_memory(wire.encode(array.T), array)  # its elements are not in order


def test_shapes_and_scalars_arrive_as_numbers() -> None:
    assert [_sent(value) for value in (tvm_ffi.Shape([2, 3]), [4, 5], 7, 1.5, True)] == [(2, 3), (4, 5), 7, 1.5, True]


def test_large_values_go_through_the_store() -> None:
    store: list[object] = []

    def put(value: object) -> int:
        store.append(value)
        return len(store) - 1

    small, large = np.ones(100, "uint8"), np.ones(5000, "uint8")
    capacity = wire.channel_bytes_for([100, 5000, 0])
    sent, references = wire.fit([small, large, 3], capacity, put)
    assert sent[0] is small and sent[1] is large and not references and not store
    sent, references = wire.fit([small, large, 3], wire.channel_bytes_for([100, 0, 0]) + 2000, put)
    assert references == [0] and sent[1] == wire.Stored(0) and sent[0] is small and store == [large]
    assert [id(value) for value in wire.fetch(sent, store.__getitem__)] == [id(small), id(large), id(3)]
    huge = np.empty(wire.STORED_BYTES, "uint8")
    sent, references = wire.fit([huge], 1 << 30, put)
    assert references == [1]  # though there is room: the store is faster from this size on
