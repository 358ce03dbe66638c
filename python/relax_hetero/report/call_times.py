"""Report data of ``bench --html`` and ``chat --html``: times of programs and of conversations."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm

from .device_peaks import describe_machine


def bench_of(threads: int, seconds: Mapping[str, Sequence[float]], failures: Mapping[str, str]) -> dict[str, Any]:
    """Convert times of programs to the ``bench`` data of a report.

    `threads`: number of threads of each program; `seconds`: times of all calls in order, by program; `failures`:
    reasons why programs do not run the model.
    """
    rows = [{"name": name, "seconds": [*seconds.get(name, ())], "fails": failures.get(name)} for name in seconds]
    missing = [{"name": name, "seconds": [], "fails": text} for name, text in failures.items() if name not in seconds]
    return {"threads": threads, "rows": [*rows, *missing]}


@dataclass(frozen=True)
class Answer:
    """An answer of a language model, with its times."""

    # Tokens of the prompt, and the number of them that were in the cache.
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float  # time from the question to the first token
    # Text, number of its tokens, and seconds since the previous piece, or since the question for the first one.
    pieces: tuple[tuple[str, int, float], ...]


def chat_report(title: str, answers: Iterable[Answer]) -> dict[str, Any]:
    """Make the data of a report of kind "chat", which `page.page_of` draws."""
    from .. import __version__

    return {
        "schema": 1,
        "kind": "chat",
        "title": title,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"relax_hetero": __version__, "tvm": str(tvm.__version__)},
        "machine": describe_machine(),
        "chat": {"answers": [_answer(answer) for answer in answers]},
    }


def _answer(answer: Answer) -> dict[str, Any]:
    tokens = [tokens for _, tokens, _ in answer.pieces]
    decode_seconds = sum(seconds for _, _, seconds in answer.pieces[1:])
    new, first = answer.prompt_tokens - answer.cached_tokens, answer.first_token_seconds
    return {
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": new,
        "first_token_seconds": first,
        "prompt_tokens_per_second": new / first if first > 0 else None,
        "tokens": sum(tokens),
        "tokens_per_second": sum(tokens[1:]) / decode_seconds if decode_seconds > 0 else None,
        "pieces": [{"text": text, "tokens": count, "seconds": seconds} for text, count, seconds in answer.pieces],
    }
