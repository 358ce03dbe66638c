"""What must hold of the numbers of a command buffer: known ones at once, those of a submission before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...artifact.dims import parse_dim
from ...errors import BindingError
from .operands import Integer, dim


@dataclass(frozen=True)
class Limit:
    """A number that each submission is asked for.

    Attributes
    ----------
    what : str
        What messages call it.
    value : str
        Arithmetic of parameters and sizes of bindings.
    low, high : int, optional
        The least and greatest value.
    multiple : int
        Of what it must be a multiple.
    """

    what: str
    value: str
    low: int | None = 0
    high: int | None = None
    multiple: int = 1

    @property
    def condition(self) -> str:
        """What must hold, as a Python expression."""
        bounds = [
            f"{self.low} <= {self.value}" if self.low is not None else "",
            f"{self.value} <= {self.high}" if self.high is not None else "",
            f"{self.value} % {self.multiple} == 0" if self.multiple > 1 else "",
        ]
        return " and ".join(filter(None, bounds)) or "True"

    def check(self, values: Mapping[str, int]) -> None:
        """BindingError where a submission's values break it."""
        evaluate = parse_dim(self.value).evaluate
        assert evaluate is not None, f"{self.value} is arithmetic by construction"
        self._check(evaluate(values), f", {self.value}")

    def _check(self, found: int, text: str) -> None:
        if self.low is not None and found < self.low:
            expected = f"at least {self.low}"
        elif self.high is not None and found > self.high:
            expected = f"at most {self.high}"
        elif found % self.multiple:
            expected = f"a multiple of {self.multiple}"
        else:
            return
        raise BindingError(f"{self.what} is {found}{text}, expected {expected}")


def all_hold(conditions: Sequence[str], names: Sequence[str]) -> Callable[..., bool]:
    """One function of the values of `names` that says whether all conditions hold.

    Texts of conditions are arithmetic that `Number` and `parse_dim` vouch for.
    """
    holds: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {' and '.join(conditions) or 'True'}")
    return holds


class Limits:
    """Limits of a recording, each once; a number that is known is checked when it is asked for.

    Those of a command count from `settle` on: a command that is refused leaves none.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Limit] = {}
        self._asked: list[Limit] = []

    def ask(self, what: str, value: Integer, low: int | None = 0, high: int | None = None, multiple: int = 1) -> None:
        """Require something of a number; BindingError, which begins with `what`, where it is known and breaks it."""
        limit = Limit(what, str(dim(value)), low, high, multiple)
        if isinstance(value, int):
            limit._check(value, "")
        else:
            self._asked.append(limit)

    def forget(self) -> None:
        """Drop what was asked since `settle`."""
        self._asked.clear()

    def settle(self) -> None:
        """Keep what was asked."""
        for limit in self._asked:
            self._found.setdefault((limit.value, limit.low, limit.high, limit.multiple), limit)
        self._asked.clear()

    def all(self) -> tuple[Limit, ...]:
        """Those that submissions are asked for."""
        return tuple(self._found.values())
