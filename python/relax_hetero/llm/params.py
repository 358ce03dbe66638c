"""`rh.llm.SamplingParams`: sampling parameters and stop conditions of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import RequestError, TokenizerError
from .structured_output import StructuredOutputs

MAX_LOGPROBS = 20  # limit of OpenAI's ``top_logprobs``
MAX_STOPS = 16
DEFAULTS_IN_FILES = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Sampling parameters that files of models recommend: names in ``generation_config.json``, and keys of GGUF files."""
MAX_STOP_CHARACTERS = 1024
"""Maximum length of a stop string, and so of the text that a stream holds back because it may begin one."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Logits are processed in vLLM's order: `logit_bias`, penalties, `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes
    ----------
    temperature : float
        Divisor of logits; 0 takes the largest one (greedy), whatever the filters below are.
    top_k : int
        Number of largest logits to keep, plus ties; 0 keeps all.
    top_p : float
        Sum of probabilities of the most probable tokens to keep, 0 (one token) to 1 (all).
    min_p : float
        Minimum probability of tokens to keep, as a fraction of the largest one, 0 to 1.
    repetition_penalty : float
        Divisor of positive logits, and factor of negative ones, of tokens in the prompt or the text so far; 1 for none.
    frequency_penalty : float
        Amount subtracted from a token's logit for each occurrence in the text so far; -2 to 2.
    presence_penalty : float
        Amount subtracted from a token's logit if it occurs in the text so far; -2 to 2.
    logit_bias : mapping of int to float
        Amounts added to logits, by token; -100 to 100.
    seed : int or None
        Seed of the request's own random generator, which other requests do not affect; None for a random one.
    stop : tuple of str
        Strings that end the text; the text is cut before them.
    stop_token_ids : tuple of int
        Tokens that end the text, besides those of the tokenizer.
    ignore_eos : bool
        Whether the tokenizer's stop tokens do not end the text.
    max_tokens : int or None
        Maximum number of tokens of the text, at least 0; None for as many as fit into the context.
    min_tokens : int
        Number of tokens before which neither stop tokens nor stop strings end the text.
    visible_tokens : tuple of str
        Names of control tokens that add their names to the text; others add nothing.
    structured_outputs : StructuredOutputs or None
        Form of the text, such as a JSON schema; None for any text.
    logprobs : int or None
        Number of most probable tokens to return with each token, by the distribution before all steps above; 0 for the
        chosen token only, None for nothing.
    prompt_logprobs : int or None
        As `logprobs`, for the tokens of the prompt (`Request.prompt_logprobs`). The whole prompt is computed then.

    Raises
    ------
    RequestError
        If a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    visible_tokens: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_integer("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias: found {self.logit_bias!r}, expected a mapping of tokens to numbers")
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias", token, 0)
            _check_number(f"logit_bias of token {token}", bias, -100, 100)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        _check_stops(self.stop)
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: found {self.min_tokens}, expected at most max_tokens, {self.max_tokens}")
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            raise RequestError(
                f"structured_outputs: found {self.structured_outputs!r:.100}, expected StructuredOutputs"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """True if the largest logit is taken; also for temperatures so small that no other can be."""
        return self.temperature < 1e-5

    @property
    def penalizes(self) -> bool:
        """True if there is a penalty for tokens of the prompt or the text so far."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def needs_logits(self) -> bool:
        """True if more than the index of the largest allowed logit is needed: to sample, or for log-probabilities."""
        return not self.greedy or self.penalizes or bool(self.logit_bias) or self.logprobs is not None

    @staticmethod
    def defaults_in(fields: Mapping[str, Any], location: str) -> dict[str, float]:
        """Parameters that a model's file recommends, by name; {} if there are none.

        Parameters
        ----------
        fields : mapping of str to object
            ``generation_config.json``, or metadata of a GGUF file.
        location : str
            Name of the file, for errors.

        Raises
        ------
        TokenizerError
            If a value is out of range.
        """
        stated = {name: fields.get(name, fields.get(key)) for name, key in DEFAULTS_IN_FILES.items()}
        values = {name: value for name, value in stated.items() if value is not None}
        if values.get("top_k") == -1:  # all tokens
            values["top_k"] = 0
        try:
            SamplingParams(**values)
        except RequestError as error:
            raise TokenizerError(f"{location}: {error}") from error
        return values

    def check_tokens(self, vocabulary: int) -> None:
        """Raise RequestError if a token id is not below `vocabulary`.

        Parameters
        ----------
        vocabulary : int
            Number of tokens of the model.
        """
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                _check_integer(name, token, 0, vocabulary - 1)


def _check_stops(stops: Any) -> None:
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop: found {stops!r}, expected a tuple of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: found {len(stops)} strings, expected at most {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"stop: found a string of {len(stop)} characters, expected 1 to {MAX_STOP_CHARACTERS}")


def _check_number(name: str, value: Any, minimum: float, maximum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise RequestError(f"{name}: found {value!r:.40}, expected a number from {minimum:g} to {maximum:g}")
    if not minimum <= value <= maximum:
        raise RequestError(f"{name}: found {value:g}, expected {minimum:g} to {maximum:g}")


def _check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    expected = f"a whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        raise RequestError(f"{name}: found {value!r}, expected {expected}")
