"""Plans of calls over hosts, as plain data: `cluster.cut` makes them, and a cluster runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from ..artifact.signature import FunctionSignature, ObjectSpec, TupleSpec, ValueSpec
from ..errors import HeteroError

CALL = -1
"""`Source.step` of inputs of the call."""


@dataclass(frozen=True)
class Source:
    """Origin of a value.

    Attributes
    ----------
    step : int
        Index of the step that computes it; `CALL` for an input of the call.
    index : int
        Index of the step's result, or of the input.
    """

    step: int
    index: int


@dataclass(frozen=True)
class HostStep:
    """One call of a function of a host's executable, between two exchanges with other hosts.

    Attributes
    ----------
    host : str
        Logical name of the host.
    function : str
        Function of the host's executable. It takes arguments by position, and returns a flat tuple, or one value if
        `results` is 1.
    arguments : tuple of Source
        Origins of the arguments.
    results : int
        Number of values that it returns.
    """

    host: str
    function: str
    arguments: tuple[Source, ...]
    results: int


@dataclass(frozen=True)
class HostRun:
    """One host's part of a function whose hosts exchange messages while it runs (`cluster.mailbox`)."""

    # As in `HostStep`.
    host: str
    function: str
    arguments: tuple[Any, ...]  # nested tuples of `Source`; None for values of other hosts


@dataclass(frozen=True)
class CallPlan:
    """Plan of one function: its steps, or runs of whole parts if it cannot be cut into steps.

    Values between steps are tensors, shapes (tuples of integers) and scalars.

    Attributes
    ----------
    steps : tuple of HostStep
        Steps in topological order; empty if there are `runs`.
    result : object
        A `Source`, or nested tuples of them, with the structure of the function's result. With `runs`, `Source.step` is
        the index of a run, and `Source.index` that of a leaf of its result.
    input_names : tuple of str
        Names of the call's inputs in order; by default those of `signature`.
    signature : FunctionSignature or None
        Inputs and results of the function, for checks of arguments. Sources index its inputs with tuples flattened.
    sizes : tuple of tuple of str
        Further inputs after those of the caller: shapes, each given by the names of symbolic sizes.
    runs : tuple of HostRun
        Parts of a function whose hosts exchange messages while it runs.
    """

    steps: tuple[HostStep, ...]
    result: Any
    input_names: tuple[str, ...] = ()
    signature: FunctionSignature | None = None
    sizes: tuple[tuple[str, ...], ...] = ()
    runs: tuple[HostRun, ...] = ()

    def __post_init__(self) -> None:
        if self.signature is not None and not self.input_names:
            object.__setattr__(self, "input_names", self.signature.input_names)

    @property
    def num_inputs(self) -> int:
        """Number of values that a call sends: inputs with tuples flattened, and `sizes`."""
        count = len(self.input_names) if self.signature is None else sum(map(_count_leaves, self.signature.inputs))
        return count + len(self.sizes)

    @cached_property
    def reads_inputs_late(self) -> bool:
        """True if inputs are read after the call was sent: by runs, or as results."""
        return bool(self.runs) or any(source.step == CALL for source in sources_of(self.result))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of each step or run."""
        return tuple(each.host for each in self.steps or self.runs)

    def check(self, name: str) -> None:
        """Check that every value is computed before it is read, and can be sent.

        Parameters
        ----------
        name : str
            Name of the function, for messages.

        Raises
        ------
        HeteroError
            If it is not; names the function, the step and the value.
        """
        self._check_signature(name)
        if not self.steps and not self.runs:
            raise HeteroError(f"the plan of function {name!r} has no steps, expected one at least")
        if self.runs:
            return
        for index, step in enumerate(self.steps):
            for source in step.arguments:
                self._check_source(source, index, f"step {index} ({step.function!r} on {step.host!r}) of {name!r}")
        for source in sources_of(self.result):
            self._check_source(source, len(self.steps), f"the result of {name!r}")

    def _check_signature(self, name: str) -> None:
        signature = self.signature
        if signature is None:
            return
        strings = *signature.string_inputs, *signature.string_outputs
        if strings:
            raise HeteroError(
                f"function {name!r} takes or returns strings ({strings[0]!r}), expected tensors of numbers"
            )
        for verb, specs in (("takes", signature.inputs), ("returns", signature.outputs)):
            for spec in filter(None, map(_find_object, specs)):
                raise HeteroError(
                    f"function {name!r} {verb} {spec.name!r}, an object that stays on its host; expected tensors, "
                    "shapes and numbers, which can be sent"
                )

    def _check_source(self, source: Source, reader: int, name: str) -> None:
        if source.step == CALL:
            count, kind = self.num_inputs, "inputs"
        elif 0 <= source.step < reader:
            count, kind = self.steps[source.step].results, f"results of step {source.step}"
        else:
            raise HeteroError(f"{name} reads step {source.step}, expected {CALL} or a step before it")
        if not 0 <= source.index < count:
            raise HeteroError(f"{name} reads number {source.index} of {count} {kind}")


Part: TypeAlias = Any
"""Code of a host: the path or the bytes of an exported library, or a Relax IRModule, which the host compiles."""


@dataclass(frozen=True)
class Program:
    """Program of a cluster.

    Attributes
    ----------
    parts : mapping of str to Part
        Code of each host.
    functions : mapping of str to CallPlan
        Plans of functions by name.
    """

    parts: Mapping[str, Part]
    functions: Mapping[str, CallPlan] = field(default_factory=dict)

    def check(self) -> None:
        """Check the plans, and that all their hosts have code; raises HeteroError."""
        if not self.functions:
            raise HeteroError("a program has no functions, expected one at least")
        for name, plan in self.functions.items():
            plan.check(name)
            for host in plan.hosts:
                if host not in self.parts:
                    hosts = ", ".join(map(repr, self.parts))
                    raise HeteroError(f"function {name!r} has a step on host {host!r}, expected one of {hosts}")


def _find_object(spec: ValueSpec) -> ObjectSpec | None:
    if isinstance(spec, TupleSpec):
        return next(filter(None, map(_find_object, spec.fields)), None)
    return spec if isinstance(spec, ObjectSpec) else None


def _count_leaves(spec: ValueSpec) -> int:
    return sum(map(_count_leaves, spec.fields)) if isinstance(spec, TupleSpec) else 1


def flatten_value(value: Any, spec: ValueSpec) -> Iterator[Any]:
    """Iterate over the leaves of a value by its specification, so that a shape is one leaf."""
    if isinstance(spec, TupleSpec):
        for element, field in zip(value, spec.fields, strict=True):
            yield from flatten_value(element, field)
    else:
        yield value


def sources_of(result: Any) -> Iterator[Source]:
    """Iterate over the sources in nested tuples."""
    if isinstance(result, Source):
        yield result
    else:
        for element in result:
            yield from sources_of(element)


def substitute(result: Any, value_of: Callable[[Source], Any]) -> Any:
    """Replace the sources in nested tuples by values."""
    if isinstance(result, Source):
        return value_of(result)
    elements: Sequence[Any] = result
    return tuple(substitute(element, value_of) for element in elements)
