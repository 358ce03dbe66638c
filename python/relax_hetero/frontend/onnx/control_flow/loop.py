"""A loop of a model as data: loop-carried values (its state), and rows that each trip appends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..node_names import NodeInfo


class Trip(NamedTuple):
    """Results of one trip: the condition of the next one, the state, and the appended rows."""

    condition: Any
    state: list[Any]
    rows: list[Any]


@dataclass
class Loop:
    """A loop to import.

    Attributes
    ----------
    title : str
        Name of its node in messages.
    trips : object
        Maximum number of trips: an int, an int64 scalar, or None if only the condition ends the loop.
    condition : object
        Boolean scalar, the condition of the first trip; None if only the count matters.
    state : list of object
        Initial loop-carried values.
    rows : int
        Number of tensors that collect rows.
    trip : callable
        Converts the body, given the trip's number (or an int64 scalar), the condition and the state.
    joins : list of int or None
        For each state value that is a sequence, the axis along which all readers concatenate it afterwards.
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
