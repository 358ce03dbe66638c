"""Values as they travel: every element type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_hetero.cluster import wire
from relax_hetero.vm.device.tensors import bytes_of, from_numpy

HOST = tvm.runtime.device("cpu", 0)


def _send(message: wire.Message, sender: wire.MessageCodec, receiver: wire.MessageCodec) -> wire.Message:
    """A message as it arrives."""
    body, arrays = sender.encode(message)
    decoded = receiver.decode_body(body)
    assert decoded.sizes == tuple(array.nbytes for array in arrays)
    return receiver.decode(decoded, message.call, [np.frombuffer(bytes(array), "uint8") for array in arrays])


def _sent(value: object) -> object:
    """A value as it arrives."""
    message = wire.Message(0, 1, "main", 2, (wire.encode(value),))
    return _send(message, wire.MessageCodec(), wire.MessageCodec()).values[0]


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


def test_messages_with_known_bodies_arrive_as_they_are() -> None:
    """Bodies are remembered by tasks, function, element types and shapes; calls, elements and other values change."""
    sender, receiver = wire.MessageCodec(), wire.MessageCodec()
    failure, both = wire.Failure(ValueError, "a reason"), np.arange(3, dtype="int32")
    for call in range(3):
        for source, target, function in ((-1, 0, "main"), (0, 1, "main"), (0, 1, "other")):
            for values in (
                (),
                (np.full(3, call, "float32"),),
                (np.full(3, call, "int32"),),
                (np.full((3, 1), call, "int32"), np.full((), call, "float16"), np.zeros((0, 2))),
                (np.full(3, call, "int32"), (call, 2), 1.5),
                (both, both),
                (both, both + call),
                (both, both, None),
                failure,
            ):
                message = wire.Message(source, target, function, call, values)
                arrived = _send(message, sender, receiver)
                assert arrived[:4] == message[:4] and type(arrived.values) is type(values)
                for value, expected in zip(arrived.values, values, strict=True):
                    assert type(value) is type(expected)
                    assert getattr(value, "dtype", None) == getattr(expected, "dtype", None)
                    np.testing.assert_array_equal(value, expected)


def test_bodies_are_forgotten_when_there_are_many() -> None:
    sender, receiver = wire.MessageCodec(), wire.MessageCodec()
    for length in (*range(400), *range(400)):
        (array,) = _send(wire.Message(0, 1, "main", 0, (np.arange(length),)), sender, receiver).values
        np.testing.assert_array_equal(array, np.arange(length))
    assert 0 < len(sender._encoded) <= 256 and 0 < len(receiver._decoded) <= 256
