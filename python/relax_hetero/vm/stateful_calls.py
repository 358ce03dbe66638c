"""Calls in steps, as code written for TVM's own machine makes them: inputs first, then the run, then the outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tvm import runtime

from ..artifact.dims import DimValues
from ..artifact.signature import FunctionSignature
from ..errors import BindingError
from .args.argument_binding import ArgumentBinding
from .args.donated_arguments import for_one_run, kept_ranges
from .device.tensors import AddressRange
from .file.executable import Executable


class StatefulCalls(ArgumentBinding, ABC):
    """The half of a machine that keeps inputs and outputs between calls.

    Parameters
    ----------
    executable : Executable
    devices : sequence of Device
        By manifest index; the last is the host.
    """

    def __init__(self, executable: Executable, devices: Sequence[runtime.Device]) -> None:
        super().__init__(executable, devices)
        self._inputs: dict[str, tuple[list[Any], DimValues, list[AddressRange]]] = {}
        self._outputs: dict[str, Any] = {}

    @abstractmethod
    def _run(
        self, signature: FunctionSignature, values: list[Any], dims: DimValues, lent: list[AddressRange], out: Any
    ) -> Any:
        """The results of a function for what `_bind` gave."""

    @abstractmethod
    def _apart(self) -> AbstractContextManager[None]:
        """Hold the lock, when nothing runs that `_run` must not meet."""

    def set_input(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Place the arguments of function `name` for `invoke_stateful`; checked as in a call."""
        signature = self.executable.signature(name)
        with self._lock:
            values, dims, _ = self._bind(signature, args, kwargs, keep=True)
            self._inputs[name] = (values, dims, kept_ranges(signature, values))

    def invoke_stateful(self, name: str) -> None:
        """Run function `name` on what `set_input` was given; BindingError without it."""
        signature = self.executable.signature(name)
        with self._apart():
            if name not in self._inputs:
                used = f"; a run consumes {', '.join(map(repr, signature.donated))}" if signature.donated else ""
                raise BindingError(
                    f"function {name!r} has no inputs set; expected set_input({name!r}, ...) first{used}"
                )
            values, dims, lent = self._inputs.pop(name) if signature.donated else self._inputs[name]
            self._outputs[name] = self._run(signature, for_one_run(signature, values), dims, lent, None)

    def get_outputs(self, name: str) -> Any:
        """The result of the last `invoke_stateful` of function `name`."""
        self.executable.signature(name)
        with self._lock:
            if name not in self._outputs:
                raise BindingError(f"function {name!r} has no outputs; expected invoke_stateful({name!r}) first")
            return self._outputs[name]

    def get_output(self, name: str, index: int = 0) -> Any:
        """One result of the last `invoke_stateful`: field `index` of a tuple, or the result itself for 0."""
        outputs = self.get_outputs(name)
        fields = outputs if isinstance(outputs, tuple) else (outputs,)
        if not 0 <= index < len(fields):
            raise BindingError(f"function {name!r} has {len(fields)} outputs, found index {index}")
        return fields[index]
