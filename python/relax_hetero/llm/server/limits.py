"""Limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import HeteroError

_MIN_SECONDS = 0.01


@dataclass(frozen=True)
class Limits:
    """Limits of a server; a request beyond is refused with a message that says what was found.

    Attributes
    ----------
    prompt_tokens : int
        Tokens of one prompt; 0 for as many as the model's context holds.
    max_tokens : int
        Tokens of one text; 0 for as many as the context holds. Requests that ask for no number get this many at most.
    in_flight : int
        Requests at a time; more are answered with 429.
    choices : int
        Texts of one request: prompts times ``n``.
    body_bytes : int
        Size of a request's body; larger ones are answered with 413.
    seconds : float
        Time for a request; then it ends with 504, or with an error in its stream.
    header_seconds : float
        Time from the first byte of a request, or from the begin of a connection, to the end of the request's headers;
        then the connection is closed.
    body_seconds : float
        Time for a request's body to come; slower ones are answered with 408.
    idle_seconds : float
        Time for which a connection is kept between two requests.
    read_seconds : float
        Time for which a client may leave an answer unread that fills its buffers; then the connection is closed.
    connections : int
        Connections in all; 0 for four times `in_flight`, at least 1,024. A new one takes the place of the one that has
        waited longest without a whole request.
    address_connections : int
        Connections from one address (of IPv6, one network of 64 bits); 0 for twice `in_flight`, at least 256.
    """

    prompt_tokens: int = 0
    max_tokens: int = 0
    in_flight: int = 128
    choices: int = 16
    body_bytes: int = 4 << 20
    seconds: float = 600.0
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    read_seconds: float = 30.0
    connections: int = 0
    address_connections: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # A count of 0 is allowed where it is the default, which stands for a limit that follows from others.
            minimum = _MIN_SECONDS if field.name.endswith("seconds") else int(field.default != 0)
            if not value >= minimum:
                raise HeteroError(f"{field.name}: found {value}, expected at least {minimum}")
