"""Limits of a server: a module of its own, because the command line reads them without the packages of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import HeteroError

_MIN_SECONDS = 0.01


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    prompt_tokens: int = 0  # tokens of a prompt; 0 for the model's context
    max_tokens: int = 0  # tokens of a generated text, also the default of requests; 0 for the model's context
    in_flight: int = 128  # concurrent requests; more are answered with 429
    choices: int = 16  # choices of a request: prompts times ``n``
    body_bytes: int = 4 << 20  # size of a body; larger ones are answered with 413
    seconds: float = 600.0  # time of a request; then it ends with 504, or with an error in its stream
    # Time from the first byte of a request, or from the start of a connection, to the end of the request's headers;
    # then the connection is closed.
    header_seconds: float = 10.0
    body_seconds: float = 30.0  # time to receive a body; slower ones are answered with 408
    idle_seconds: float = 30.0  # time that a connection stays open between requests (keep-alive)
    # Time that a client may not read an answer that fills its buffers; then the connection is closed.
    read_seconds: float = 30.0
    # Open connections; 0 for four times `in_flight`, at least 1,024. Beyond that, a new connection replaces the one
    # that has been idle longest.
    connections: int = 0
    # Connections from one address (of IPv6, one network of 64 bits); 0 for twice `in_flight`, at least 256.
    address_connections: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # 0 is allowed where it is the default, which means a limit that follows from others.
            minimum = _MIN_SECONDS if field.name.endswith("seconds") else int(field.default != 0)
            if not value >= minimum:
                raise HeteroError(f"{field.name}: found {value}, expected at least {minimum}")
