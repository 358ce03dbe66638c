"""The integers that a model's functions are given at each call: tokens, positions and tables of pages.

They lie one after the other in one tensor on each device, whose values each call overwrites: a copy to a GPU takes the
host some 50 us however small it is, and a decode step has five such inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from tvm import runtime

from ..artifact.signature import TensorSpec
from ..vm.device.tensors import copy_into, empty, is_host, part_of


class SentIntegers:
    """Inputs of one function.

    Parameters
    ----------
    inputs : sequence of TensorSpec
        Inputs of int32; their devices are indices in `devices`, -1 the host.
    devices : sequence of tvm.runtime.Device
    alignment : int
        Alignment of each input's memory, in bytes.

    Attributes
    ----------
    arrays : dict of str to array of int32
        Memory of the host for each input, by name: `send` has the tensors show what is written there.
    tensors : list of tvm.runtime.Tensor
        Arguments in the order of `inputs`; the same tensors for the object's life.
    """

    def __init__(self, inputs: Sequence[TensorSpec], devices: Sequence[runtime.Device], alignment: int) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._copies: list[tuple[runtime.Tensor, runtime.Tensor]] = []
        found: dict[str, runtime.Tensor] = {}
        for index in {spec.device for spec in inputs}:
            device = runtime.device("cpu", 0) if index < 0 else devices[index]
            found |= self._place([spec for spec in inputs if spec.device == index], device, alignment)
        self.tensors = [found[spec.name] for spec in inputs]

    def _place(self, inputs: Sequence[TensorSpec], device: runtime.Device, alignment: int) -> dict[str, runtime.Tensor]:
        shapes = {spec.name: tuple(int(extent) for extent in spec.shape or ()) for spec in inputs}
        step, count, begins = -(-alignment // 4), 0, {}
        for name, shape in shapes.items():
            begins[name] = count
            count += -(-prod(shape) // step) * step
        target = empty((count,), "int32", device)
        source = target if is_host(device) else empty((count,), "int32", runtime.device("cpu", 0))
        if source is not target:
            self._copies.append((source, target))
        host = np.from_dlpack(source)
        for name, shape in shapes.items():
            self.arrays[name] = host[begins[name] : begins[name] + prod(shape)].reshape(shape)
        return {name: part_of(target, shape, "int32", 4 * begins[name]) for name, shape in shapes.items()}

    def send(self) -> None:
        """Have the tensors show what `arrays` hold; work on CPUs that reads the old values must have ended."""
        for source, target in self._copies:
            copy_into(source, target)
