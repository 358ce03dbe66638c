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
    """A loop to import."""

    info: NodeInfo
    title: str  # name of its node in messages
    nodes: int
    trips: Any  # maximum number of trips: an int, an int64 scalar, or None if only the condition ends the loop
    condition: Any  # boolean scalar, the condition of the first trip; None if only the count matters
    state: list[Any]  # initial loop-carried values
    rows: int  # number of tensors that collect rows
    # Converts the body, given the trip's number (or an int64 scalar), the condition and the state.
    trip: Callable[[Any, Any, list[Any]], Trip]
    names: list[str] = field(default_factory=list)
    # For each state value that is a sequence, the axis along which all readers concatenate it afterwards.
    joins: list[int | None] = field(default_factory=list)
