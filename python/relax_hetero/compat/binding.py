"""IO binding: inputs and outputs of a call in memory that the caller names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_hetero.compat.errors import InvalidArgument
from relax_hetero.compat.values import OrtValue, memory_at


class IOBinding:
    """Inputs and outputs of `InferenceSession.run_with_iobinding`.

    Parameters
    ----------
    session : InferenceSession
        Session whose names are bound.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs: dict[str, OrtValue] = {}
        self._outputs: dict[str, OrtValue | str] = {}
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Bind an array."""
        self.bind_ortvalue_input(name, OrtValue(arr_on_cpu))

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind memory, which the caller keeps until the call ends."""
        self.bind_ortvalue_input(name, memory_at(buffer_ptr, device_type, device_id, element_type, shape))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value."""
        names = [*self._session._input_types]
        if name not in names:
            raise InvalidArgument.of(f"Failed to find input name in the mapping: {name}; expected {', '.join(names)}")
        self._inputs[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind memory for an output, or name the device where a new value is made."""
        if buffer_ptr is None:
            self._bind_output(name, device_type)
        else:
            self._bind_output(name, memory_at(buffer_ptr, device_type, device_id, element_type, shape or ()))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a value that is overwritten."""
        self._bind_output(name, ortvalue)

    def _bind_output(self, name: str, target: OrtValue | str) -> None:
        names = [output.name for output in self._session.get_outputs()]
        if name not in names:
            raise InvalidArgument.of(f"Failed to find output name in the mapping: {name}; expected {', '.join(names)}")
        self._outputs[name] = target

    def synchronize_inputs(self) -> None:
        """Nothing: calls wait for their inputs."""

    def synchronize_outputs(self) -> None:
        """Nothing: calls return when their outputs are complete."""

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last call, in the order in which they were bound."""
        return list(self._results)

    get_outputs_as_ortvaluevector = get_outputs

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs of the last call as arrays."""
        return [value.numpy() for value in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._results.clear()

    def _run(self) -> None:
        """Call the session, and write or keep the outputs."""
        names = list(self._outputs)
        results = self._session.run_with_ort_values(names, self._inputs) if names else []
        self._results = [
            _bound(name, target, result) for (name, target), result in zip(self._outputs.items(), results, strict=True)
        ]


def _bound(name: str, target: OrtValue | str, result: OrtValue) -> OrtValue:
    """The output in the memory that was bound, or on the device that was named."""
    if isinstance(target, str):
        return OrtValue(result.numpy()) if target == "cpu" and not result._on_host() else result
    if (target.shape(), target.data_type()) != (result.shape(), result.data_type()):
        raise InvalidArgument.of(
            f"output {name!r} is {result.data_type()}{result.shape()}, but {target.data_type()}{target.shape()} is "
            "bound to it; bind memory of its size"
        )
    target._assign(result._value)
    return target
