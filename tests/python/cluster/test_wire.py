"""Values as they travel: every element type."""

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
    """A value as it arrives."""
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
        for decode in (wire.decode_copy, wire.decode_received):
            arrived = decode(_sent(value))
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
