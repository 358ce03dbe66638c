"""The integers that a model's functions are given at each call: tokens, positions and tables of pages.

A copy to a GPU takes the host some 50 us however small it is, and a decode step has five such inputs: they lie one
after the other in one tensor on the GPU, which one copy fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from tvm import runtime

from ..artifact.signature import TensorSpec
from ..vm.device.tensors import copy_into, empty, from_array, is_host, part_of


class SentIntegers:
    """Inputs of one function.

    Parameters
    ----------
    inputs : sequence of TensorSpec
        Of int32.
    devices : sequence of tvm.runtime.Device
        That the specs count.
    alignment : int
        Bytes, of each input's memory on a GPU.
    """

    def __init__(self, inputs: Sequence[TensorSpec], devices: Sequence[runtime.Device], alignment: int) -> None:
        self._names = [spec.name for spec in inputs]
        gpus = {spec.device: devices[spec.device] for spec in inputs if spec.device >= 0}
        gpus = {index: device for index, device in gpus.items() if not is_host(device)}
        self._sent = [
            _OnDevice([spec for spec in inputs if spec.device == index], device, alignment)
            for index, device in gpus.items()
        ]

    def send(self, values: Mapping[str, np.ndarray]) -> list[Any]:
        """The arguments, in order: on GPUs tensors whose values the next call overwrites, arrays for CPUs."""
        found: dict[str, Any] = {}
        for each in self._sent:
            found |= each.send(values)
        return [found.get(name, values[name]) for name in self._names]


class _OnDevice:
    def __init__(self, inputs: Sequence[TensorSpec], device: runtime.Device, alignment: int) -> None:
        shapes = {spec.name: tuple(int(extent) for extent in spec.shape or ()) for spec in inputs}
        step = max(1, alignment // 4)
        begins, count = {}, 0
        for name, shape in shapes.items():
            begins[name] = count
            count += -(-prod(shape) // step) * step
        host = np.zeros(count, "int32")
        self._source, self._target = from_array(host), empty((count,), "int32", device)
        self._host, self._tensors = {}, {}
        for name, shape in shapes.items():
            self._host[name] = host[begins[name] : begins[name] + prod(shape)].reshape(shape)
            self._tensors[name] = part_of(self._target, shape, "int32", 4 * begins[name])

    def send(self, values: Mapping[str, np.ndarray]) -> Mapping[str, runtime.Tensor]:
        for name, array in self._host.items():
            array[...] = values[name]
        copy_into(self._source, self._target)
        return self._tensors
