"""Calls in steps, as code written for TVM's own machine makes them: inputs first, then the run, then the outputs."""

from __future__ import annotations

from typing import Any

from ..artifact.signature import FunctionSignature
from ..errors import BindingError
from .args.argument_binding import BoundArguments
from .args.donated_arguments import for_one_run, retained_ranges


class StatefulCalls:
    """The inputs and outputs that a machine keeps between calls, by function. Used by one thread at a time."""

    def __init__(self) -> None:
        self._inputs: dict[str, BoundArguments] = {}
        self._outputs: dict[str, Any] = {}

    def set_inputs(self, signature: FunctionSignature, bound: BoundArguments) -> None:
        """Keep the arguments of a function for its runs."""
        self._inputs[signature.name] = bound._replace(borrowed=retained_ranges(signature, bound.values))

    def inputs_of_run(self, signature: FunctionSignature) -> BoundArguments:
        """The arguments of one run; BindingError where none are set, or a run has consumed them."""
        name = signature.name
        if name not in self._inputs:
            used = f"; a run consumes {', '.join(map(repr, signature.donated))}" if signature.donated else ""
            raise BindingError(f"function {name!r} has no inputs set; expected set_input({name!r}, ...) first{used}")
        bound = self._inputs.pop(name) if signature.donated else self._inputs[name]
        return bound._replace(values=for_one_run(signature, bound.values))

    def set_outputs(self, name: str, outputs: Any) -> None:
        """Keep the result of a function's run."""
        self._outputs[name] = outputs

    def outputs(self, name: str) -> Any:
        """The result of a function's last run; BindingError where it has not run."""
        if name not in self._outputs:
            raise BindingError(f"function {name!r} has no outputs; expected invoke_stateful({name!r}) first")
        return self._outputs[name]
