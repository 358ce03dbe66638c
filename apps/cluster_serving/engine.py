"""The interface between serving and a model: all that serving knows of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class RefusedError(Exception):
    """A request that is refused because of an error of the caller.

    Attributes
    ----------
    status : int
        The HTTP status, 400 to 499.
    """

    def __init__(self, status: int, message: str) -> None:
        # Both go to the base class, which carries them through pickling.
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return self.message


class Model(Protocol):
    """A model in a replica; its methods are called one at a time, in one thread."""

    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return a result for each item, in the same order."""

    def check(self) -> None:
        """Compute a known result; raise any error if this replica is to be replaced."""


class Engine(Protocol):
    """A model that answers requests by batches of items; requests of several callers share a batch.

    An engine is settings without state: it is pickled into the gateways, which read and write requests with it, and
    into the replicas, which load its model.

    Attributes
    ----------
    path : str
        Path of the URL to which requests are posted.
    most_items : int
        Maximum number of items of a request.
    batch_items : int
        Number of items of a full batch: the smallest number at which the model runs at its full speed, because a
        replica that takes all waiting requests at once is idle until their callers send new ones. Requests with more
        items are split.
    """

    path: str
    most_items: int
    batch_items: int

    def read(self, request: Mapping[str, Any]) -> Sequence[Any]:
        """The items of a request, checked; at least one.

        Raises
        ------
        RefusedError
            If the request is not one for this engine; the message says what was found and what was expected.
        """

    def write(self, request: Mapping[str, Any], results: Sequence[Any]) -> bytes:
        """The JSON text that answers a request with the results of its items."""

    def load(self) -> Model:
        """The model, ready to run, in the process and the thread that will run it."""
