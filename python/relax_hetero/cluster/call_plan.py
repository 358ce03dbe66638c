"""Plans of calls over hosts, as plain data: which host runs which function, and which values go where.

The cut of a module by hosts makes these plans, and a cluster runs them; neither needs to know more of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..artifact.signature import FunctionSignature, ObjectSpec, TupleSpec, ValueSpec
from ..errors import HeteroError

CALL = -1
"""The "step" of a `Source` that is the call itself."""


@dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Attributes
    ----------
    step : int
        The number of the step that makes it; `CALL` for an input of the call.
    index : int
        Which result of that step, or which input.
    """

    step: int
    index: int


@dataclass(frozen=True)
class HostStep:
    """An uninterrupted piece of work of one host: one function of the host's executable, called once.

    Attributes
    ----------
    host : str
        The logical name of the host.
    function : str
        Its name in the host's executable. It takes its arguments by position, and returns a flat tuple, or one value if
        `results` is 1.
    arguments : tuple of Source
        Where each argument comes from.
    results : int
        How many values it returns.
    """

    host: str
    function: str
    arguments: tuple[Source, ...]
    results: int


@dataclass(frozen=True)
class HostRun:
    """One host's whole part of a function whose hosts exchange messages while it runs (`cluster.mailbox`).

    Attributes
    ----------
    host, function : str
        As of a `Step`.
    arguments : tuple of object
        Nested tuples of `Source`; None stands for what is on other hosts.
    """

    host: str
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class CallPlan:
    """The steps of one function of the user's module, or the hosts' parts where it cannot be cut into steps.

    Values between steps are tensors, shapes (tuples of integers) and scalars.

    Attributes
    ----------
    steps : tuple of HostStep
        In an order in which they can run; none where there are `runs`.
    result : object
        A `Source`, or nested tuples of them, as the function returns its results. With `runs`, the step of a source is
        the number of a run, and its index counts the leaves of what that returns.
    input_names : tuple of str
        Names of the call's inputs, in order; taken from `signature` where that is given.
    signature : FunctionSignature or None
        The function's inputs and results, by which arguments are checked before anything travels. Sources count its
        inputs with tuples opened.
    sizes : tuple of tuple of str
        Inputs behind those of the caller: for each, the names of symbolic sizes, whose values are a shape.
    runs : tuple of HostRun
        The parts of a function whose hosts exchange messages while it runs.
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
        """How many values a call sends: its inputs, tuples opened, and `sizes`."""
        given = len(self.input_names) if self.signature is None else sum(map(_leaves, self.signature.inputs))
        return given + len(self.sizes)

    @property
    def reads_inputs_late(self) -> bool:
        """True if inputs are read after the call was sent: by hosts that exchange messages, or as results."""
        return bool(self.runs) or any(source.step == CALL for source in sources_of(self.result))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each step, or of each run."""
        return tuple(each.host for each in self.steps or self.runs)

    def check(self, name: str) -> None:
        """Require that every value is made before it is read.

        Parameters
        ----------
        name : str
            Name of the function, for messages.

        Raises
        ------
        HeteroError
            Names the function `name`, the step and the value; or an input or result that cannot be sent.
        """
        self._check_signature(name)
        if not self.steps and not self.runs:
            raise HeteroError(f"the plan of function {name!r} has no steps, expected one at least")
        if self.runs:
            return
        for number, step in enumerate(self.steps):
            for source in step.arguments:
                self._check_source(source, number, f"step {number} ({step.function!r} on {step.host!r}) of {name!r}")
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
        for what, specs in (("takes", signature.inputs), ("returns", signature.outputs)):
            for found in filter(None, map(_object_in, specs)):
                raise HeteroError(
                    f"function {name!r} {what} {found.name!r}, an object that stays on its host; expected tensors, "
                    "shapes and numbers, which can be sent"
                )

    def _check_source(self, source: Source, reader: int, where: str) -> None:
        if source.step == CALL:
            count, what = self.num_inputs, "inputs"
        elif 0 <= source.step < reader:
            count, what = self.steps[source.step].results, f"results of step {source.step}"
        else:
            raise HeteroError(f"{where} reads step {source.step}, expected {CALL} or a step before it")
        if not 0 <= source.index < count:
            raise HeteroError(f"{where} reads number {source.index} of {count} {what}")


Part: TypeAlias = Any
"""Code that a host runs: the path of an exported library, its bytes, or a Relax IRModule, which the host compiles."""


@dataclass(frozen=True)
class Program:
    """Program that a cluster runs.

    Attributes
    ----------
    parts : mapping of str to Part
        Parts that run, by host.
    functions : mapping of str to CallPlan
        Plans of the functions that can be called, by name.
    """

    parts: Mapping[str, Part]
    functions: Mapping[str, CallPlan] = field(default_factory=dict)

    def check(self) -> None:
        """Require plans in order, on hosts that have a part; HeteroError names what is not."""
        if not self.functions:
            raise HeteroError("a program has no functions, expected one at least")
        for name, plan in self.functions.items():
            plan.check(name)
            for host in plan.hosts:
                if host not in self.parts:
                    known = ", ".join(map(repr, self.parts))
                    raise HeteroError(f"function {name!r} has a step on host {host!r}, expected one of {known}")


def _object_in(spec: ValueSpec) -> ObjectSpec | None:
    if isinstance(spec, TupleSpec):
        return next(filter(None, map(_object_in, spec.fields)), None)
    return spec if isinstance(spec, ObjectSpec) else None


def _leaves(spec: ValueSpec) -> int:
    return sum(map(_leaves, spec.fields)) if isinstance(spec, TupleSpec) else 1


def opened(value: Any, spec: ValueSpec) -> Iterator[Any]:
    """A value with its tuples opened, as the specification of a result says: a shape is one value."""
    if isinstance(spec, TupleSpec):
        for part, field in zip(value, spec.fields, strict=True):
            yield from opened(part, field)
    else:
        yield value


def sources_of(result: Any) -> Iterator[Source]:
    """The sources in a result, tuples opened, in order."""
    if isinstance(result, Source):
        yield result
    else:
        for part in result:
            yield from sources_of(part)


def filled(result: Any, value_of: Callable[[Source], Any]) -> Any:
    """A result with values in the places of its sources."""
    if isinstance(result, Source):
        return value_of(result)
    parts: Sequence[Any] = result
    return tuple(filled(part, value_of) for part in parts)
