"""A loop of a model as data: the values that trips hand on, and the rows that trips collect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..node_names import NodeInfo


class Trip(NamedTuple):
    """The results of one trip: whether there is another, the values handed on, and the rows it adds."""

    condition: Any
    state: list[Any]
    rows: list[Any]


@dataclass
class Loop:
    """A loop to be imported.

    Attributes
    ----------
    title : str
        How messages call its node.
    trips : object
        How many there are at most: a number, a scalar of int64, or None where only the condition ends it.
    condition : object
        Whether there is a first trip, a scalar of bool; None where only the count matters.
    state : list of object
        The values that the first trip takes.
    rows : int
        How many tensors the trips collect.
    trip : callable
        Converts the body, from the number of the trip (or a scalar of int64), the condition and the state.
    joins : list of int or None
        Axes along which all that read the last value of the state join it, if it is a sequence.
    """

    info: NodeInfo
    title: str
    nodes: int
    trips: Any
    condition: Any
    state: list[Any]
    rows: int
    trip: Callable[[Any, Any, list[Any]], Trip]
    names: list[str] = field(default_factory=list)
    joins: list[int | None] = field(default_factory=list)
