"""What a server takes at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import HeteroError


@dataclass(frozen=True)
class Limits:
    """What a server takes at most; a request beyond is refused with a message that says what was found.

    Attributes
    ----------
    prompt_tokens: Of one prompt; 0 for as many as the model's context holds.
    max_tokens: Of one text; 0 for as many as the context holds. Requests that ask for none get this many at most.
    in_flight: Requests at a time; more are answered with 429.
    choices: Texts of one request: prompts times ``n``.
    body_bytes: Of a request's body; larger ones are answered with 413.
    seconds: That a request may take; then it ends with 504, or with an error in its stream.
    body_seconds: That a request's body may take to come; slower ones are answered with 408.
    """

    prompt_tokens: int = 0
    max_tokens: int = 0
    in_flight: int = 128
    choices: int = 16
    body_bytes: int = 4 << 20
    seconds: float = 600.0
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = {"prompt_tokens": 0, "max_tokens": 0, "seconds": 0.01, "body_seconds": 0.01}.get(field.name, 1)
            if not value >= least:
                raise HeteroError(f"{field.name}: found {value}, expected at least {least}")
