"""Steps of a partitioned function: each host's part is cut where it waits for another host.

`PartitionByHost` leaves a function for each host, with sends and receives inside. A host that ran such a function whole
would stand still at every receive. So a part is cut into *steps*, functions that take what arrives as parameters and
return what is sent, and a `CallPlan` says which value goes where:

- The *level* of a binding is how often values cross hosts on the longest way from the call to it. The bindings of one
  host and one level are a step; values go from lower levels to higher ones, so no two steps wait for each other, and
  there are no more steps than crossings in a row demand.
- A step from which nothing goes to another host joins the next one of its host.

Parts that exchange messages inside of a branch, or in a function that they call, cannot be cut: what they send
depends on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tvm import relax

from ...errors import BuildError
from ...transform.partition.form_schedules import step_function
from ..call_plan import CALL, HostStep, Source
from .host_parts import HostPart


class HostVar(NamedTuple):
    """A variable of a host."""

    host: str
    var: relax.Var


Key: TypeAlias = "tuple[int, str]"
"""A step before it has a number: level and host."""


@dataclass
class CutFunction:
    """A function cut into steps.

    Attributes
    ----------
    steps : list of HostStep
        In an order in which they can run.
    sizes : list of tuple of str
        Inputs behind the call's own: shapes of these symbolic sizes.
    result : object
        As in `CallPlan`; an empty tuple stands for an empty shape.
    functions : dict of str to dict of str to relax.Function
        Functions of the steps, by host and name.
    """

    steps: list[HostStep] = field(default_factory=list)
    sizes: list[tuple[str, ...]] = field(default_factory=list)
    result: Any = ()
    functions: dict[str, dict[str, relax.Function]] = field(default_factory=dict)


def cut_steps(name: str, parts: Mapping[str, HostPart], inputs: int) -> CutFunction:
    """A function of `inputs` inputs, tuples opened, cut into steps.

    Raises
    ------
    BuildError
        If its parts wait for each other.
    """
    return _Cutter(name, parts, inputs).cut()


class _Cutter:
    def __init__(self, name: str, parts: Mapping[str, HostPart], inputs: int) -> None:
        self._name, self._parts, self._inputs = name, parts, inputs
        self._senders = {channel: (host, var) for host, part in parts.items() for channel, var in part.sends.items()}
        self._bring_to_first_host()
        self._result = self._result_places([part.result for part in parts.values()])
        self._bound = {HostVar(host, b.var) for host, part in parts.items() for b in part.bindings}
        self._levels: dict[HostVar, int] = {}
        self._cut = CutFunction(functions={host: {} for host in parts})

    def cut(self) -> CutFunction:
        self._find_levels()
        self._join_silent()
        hosts = list(self._parts)
        keys = sorted({(self._levels[HostVar(host, b.var)], hosts.index(host)) for host, b in self._work()})
        # A function that does nothing, as it returns inputs alone, has one step that does nothing.
        self._keys: list[Key] = [(level, hosts[rank]) for level, rank in keys or [(0, 0)]]
        wanted = self._needed()
        self._makes = {
            key: [
                b.var
                for b in self._parts[key[1]].bindings
                if HostVar(key[1], b.var) in wanted and self._key(key[1], b.var) == key
            ]
            for key in self._keys
        }
        for key in self._keys:
            self._add_step(key)
        self._cut.result = self._sources(self._result)
        return self._cut

    def _work(self) -> list[tuple[str, relax.Binding]]:
        return [(host, b) for host, part in self._parts.items() for b in part.bindings if b.var not in part.free]

    def _origin(self, host: str, var: relax.Var) -> HostVar:
        """Where a value that arrived was made: another host's variable that did not arrive there itself."""
        while var in self._parts[host].receives:
            host, var = self._senders[self._parts[host].receives[var]]
        return HostVar(host, var)

    def _bring_to_first_host(self) -> None:
        """Values that come back to the host that made them never left it."""
        for host, part in self._parts.items():
            for var in list(part.receives):
                source, made = self._origin(host, var)
                if source == host:
                    part.keep(var, made)
        self._senders = {c: (host, var) for host, part in self._parts.items() for c, var in part.sends.items()}

    def _find_levels(self) -> None:
        """The level of every binding; hosts take turns, as each waits for others."""
        waiting = {host: list(part.bindings) for host, part in self._parts.items()}
        last = dict.fromkeys(waiting, 0)
        moved = True
        while moved:
            moved = False
            for host, bindings in waiting.items():
                done = 0
                for binding in bindings:
                    level = self._level(host, binding)
                    if level is None:
                        break
                    if self._parts[host].in_order and binding.var not in self._parts[host].free:
                        level = last[host] = max(level, last[host])
                    self._levels[HostVar(host, binding.var)] = level
                    done += 1
                moved = moved or done > 0
                waiting[host] = bindings[done:]
        stuck = {host: bindings[0].var.name for host, bindings in waiting.items() if bindings}
        if stuck:
            raise BuildError(f"function {self._name!r}: hosts wait for each other, at {stuck}")

    def _level(self, host: str, binding: relax.Binding) -> int | None:
        """The level that a binding needs; None where it is not known yet."""
        level = 0
        for var in self._parts[host].reads(binding):
            source, made = self._origin(host, var)
            if made in self._parts[source].params or HostVar(source, made) not in self._bound:
                continue
            found = self._levels.get(HostVar(source, made))
            if found is None:
                return None
            level = max(level, found + (source != host))
        return level

    def _join_silent(self) -> None:
        """Steps that send nothing join the next one of their host."""
        loud = {
            (source, self._levels[HostVar(source, made)])
            for host, part in self._parts.items()
            for source, made in (self._origin(host, var) for binding in part.bindings for var in part.reads(binding))
            if source != host and HostVar(source, made) in self._levels
        }
        for host, part in self._parts.items():
            levels = sorted({self._levels[HostVar(host, b.var)] for b in part.bindings if b.var not in part.free})
            new: dict[int, int] = {}
            following = None
            for level in reversed(levels):
                is_silent = following is not None and (host, level) not in loud
                following = new[level] = following if is_silent and following is not None else level
            for binding in part.bindings:
                at = self._levels[HostVar(host, binding.var)]
                self._levels[HostVar(host, binding.var)] = new.get(at, at)

    def _key(self, host: str, var: relax.Var) -> Key:
        return self._levels[HostVar(host, var)], host

    def _closed(self, key: Key) -> tuple[list[relax.Binding], list[relax.Var]]:
        """The bindings of a step, with the free ones that they need, and the variables that they take from outside."""
        part = self._parts[key[1]]
        by_var = {b.var: b for b in part.bindings}
        own = [b for b in part.bindings if b.var not in part.free and self._key(key[1], b.var) == key]
        inside = {b.var for b in own}
        outside: dict[relax.Var, None] = {}
        pending = list(own)
        while pending:
            for var in part.reads(pending.pop()):
                if var in inside:
                    continue
                if var in part.free:
                    inside.add(var)
                    pending.append(by_var[var])
                elif var in by_var or var in part.params or var in part.receives:
                    outside[var] = None
        bindings = [b for b in part.bindings if b.var in inside]
        order = {var: index for index, var in enumerate((*part.params, *part.receives, *by_var))}
        return bindings, sorted(outside, key=order.__getitem__)

    def _needed(self) -> set[HostVar]:
        """Values that steps have to return: for other steps, and for the caller."""
        wanted = {self._origin(host, var) for host, var in self._leaves(self._result)}
        for key in self._keys:
            wanted |= {self._origin(key[1], var) for var in self._closed(key)[1]}
        return wanted

    def _add_step(self, key: Key) -> None:
        host = key[1]
        bindings, reads = self._closed(key)
        function = f"{self._name}_{len(self._cut.functions[host])}"
        func, sizes = step_function(bindings, reads, self._makes[key], is_pure=not self._parts[host].in_order)
        arguments = [self._source(host, var) for var in reads]
        if sizes:
            arguments.append(self._size_input(sizes))
        self._cut.functions[host][function] = func.with_attr("global_symbol", function)
        self._cut.steps.append(HostStep(host, function, tuple(arguments), len(self._makes[key])))

    def _size_input(self, sizes: tuple[str, ...]) -> Source:
        if sizes not in self._cut.sizes:
            self._cut.sizes.append(sizes)
        return Source(CALL, self._inputs + self._cut.sizes.index(sizes))

    def _source(self, host: str, var: relax.Var) -> Source:
        host, var = self._origin(host, var)
        number = self._parts[host].params.get(var)
        if number is not None:
            return Source(CALL, number)
        key = self._key(host, var)
        return Source(self._keys.index(key), self._makes[key].index(var))

    def _result_places(self, results: Sequence[relax.Expr]) -> Any:
        """The result, each leaf as a variable of the host that has it."""
        if isinstance(results[0], relax.Tuple):
            return tuple(
                self._result_places([each.fields[i] for each in results]) for i in range(len(results[0].fields))
            )
        for (host, part), value in zip(self._parts.items(), results, strict=True):
            if isinstance(value.ty, relax.ShapeType) and int(value.ty.ndim) == 0:
                continue  # it is elsewhere
            return HostVar(host, part.variable_of(value))
        return ()

    def _leaves(self, result: Any) -> list[HostVar]:
        if isinstance(result, HostVar):
            return [result]
        return [place for each in result for place in self._leaves(each)]

    def _sources(self, result: Any) -> Any:
        if isinstance(result, HostVar):
            return self._source(*result)
        return tuple(map(self._sources, result))
