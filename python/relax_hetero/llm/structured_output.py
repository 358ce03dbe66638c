"""Structured output: texts that fit a JSON schema, a regular expression, a grammar, or a list of choices.

The package llguidance compiles each of them to a grammar over the bytes of tokens. After each token, a thread computes
the mask of tokens that may follow, while the model computes their logits.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from typing import Any

import numpy as np

from ..encoding.token_masks import mask_words
from ..errors import pip_install
from .errors import EngineClosedError, RequestError
from .model import TokenizerProtocol
from .special_tokens import control_tokens

JSON_OPTIONS = {"whitespace_pattern": r"(| |\n{1,2}[ \t]{0,20})"}
"""Options of llguidance for JSON: blanks as in llama.cpp's grammars, so that a weak model cannot write them forever."""
_MAX_COMPILED = 16
"""Number of compiled grammars to keep for further requests; large ones take a second to compile, and up to 50 MB."""
_MAX_LEXER_STATES = 50_000  # limit of a grammar's states, each of 1 to 2 KB; JSON schemas have some hundreds
_MAX_SOURCE_CHARACTERS = 1 << 20
_GBNF_RULE = re.compile(r"^\s*([\w-]+)\s*::=", re.MULTILINE)
_GBNF_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*]|#[^\n]*|[\w-]+', re.DOTALL)
"""Texts, sets of characters, comments, and names of rules."""
_STACK_BYTES = 1 << 30
"""Stack of a thread that compiles a grammar, of which only used pages take memory: llguidance descends rules that name
rules, with up to 3 KB for each ten characters of the source."""
_STACK_SIZE_LOCK = threading.Lock()
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.eE\d]+)')
_NEGATIVE = re.compile(r"(?<=[\s:,[])-\d+(?:\.\d+)?(?:[eE]\+?\d+)?")
"""Negative numbers of JSON, rather than digits after a hyphen in a text."""
_MAX_MULTIPLE = 20_000
"""Limit of the least common multiple of a schema's ``multipleOf``: llguidance has a state for each remainder."""
_THREADS = 4
"""Threads that compute masks: most take a fraction of a millisecond, those of unusual grammars must not block them."""


@dataclass(frozen=True)
class StructuredOutputs:
    """Form of a text, by one of the first five attributes, with vLLM's names.

    A text that ends with ``stop`` has this form; one that ends with ``length`` is the beginning of such a text.

    Attributes
    ----------
    json : mapping or str, optional
        JSON schema, or its JSON text. Keywords that llguidance lacks, such as ``uniqueItems``, are errors.
    regex : str, optional
        Regular expression (of Rust's package regex) that the whole text matches.
    choice : sequence of str, optional
        Texts, one of which is written.
    grammar : str, optional
        Grammar in llguidance's dialect of Lark, with a rule ``start``, or in GBNF of llama.cpp, with a rule ``root``.
    json_object : bool, optional
        Whether the text is any JSON object.
    location : str
        Name of the field that asks for it, for errors.
    prefix : str
        Rules in Lark for what precedes the form, such as reasoning, with a rule ``prefix``; empty for nothing.

    Raises
    ------
    RequestError
        If none of the five is given, or several, or one has another type.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    location: str = "structured_outputs"
    prefix: str = ""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in _ABSENT]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError(f"{self.location}: found {found}, expected one of {', '.join(FORMS)}")
        value, kinds = getattr(self, given[0]), FORMS[given[0]].kinds
        if not isinstance(value, kinds) or (given[0] == "choice" and not _is_choice(value)):
            raise RequestError(f"{self.location}: found {value!r:.100}, expected {FORMS[given[0]].expected}")

    @property
    def source(self) -> str:
        """Grammar in Lark.

        Raises
        ------
        RequestError
            If it is too long, not a grammar in GBNF, or needs too many states for ``multipleOf``.
        """
        name = next(name for name in FORMS if getattr(self, name) not in _ABSENT)
        with package_errors(self.location):
            source = FORMS[name].rule(getattr(self, name))
        source = f"start: {'prefix ' * bool(self.prefix)}form\n{self.prefix}\nform: {source}"
        if len(source) > _MAX_SOURCE_CHARACTERS:
            found = f"found {len(source):,} characters"
            raise RequestError(f"{self.location}: {found}, expected at most {_MAX_SOURCE_CHARACTERS:,}")
        with package_errors(self.location):
            _check_numbers(source)
        return source


@dataclass(frozen=True)
class _Form:
    """Types of a form's value, their description, and the function that writes the rest of a rule ``form:`` in Lark."""

    kinds: tuple[type, ...]
    expected: str
    rule: Callable[[Any], str]


def _check_numbers(source: str) -> None:
    """Raise RequestError for numbers of which llguidance cannot make an expression.

    Multiples take seconds, unless they are powers of ten; the lowest integer of 64 bits overflows the stack.
    """
    lowest = next((text for text in _NEGATIVE.findall(source) if float(text) <= -(2.0**63)), None)
    if lowest is not None:
        raise RequestError(f"found the number {lowest:.40}, expected more than {-(2**63):,}")
    unescaped = re.sub(r"\\u([\da-fA-F]{4})", lambda match: chr(int(match[1], 16)), source)
    multiple = 1
    for text in _MULTIPLE_OF.findall(unescaped):
        digits = Decimal(text).normalize().as_tuple().digits
        multiple = math.lcm(multiple, int("".join(map(str, digits))) or 1)
        if multiple > _MAX_MULTIPLE:
            found = f"found numbers whose least common multiple is {multiple:,}"
            raise RequestError(f"multipleOf: {found}, expected at most {_MAX_MULTIPLE:,} (without zeros at its end)")


def _is_choice(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0 and all(isinstance(each, str) and each for each in value)


def _json_rule(schema: Mapping[str, Any] | str) -> str:
    value = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(value, Mapping):
        raise RequestError(f"found {value!r:.100}, expected an object")
    return "%json " + json.dumps({**value, "x-guidance": JSON_OPTIONS})


def _regex_rule(regex: str) -> str:
    return f"/{_package().regex_to_lark(regex, use_ascii='')}/"


def pattern_rule(pattern: str) -> str:
    """Terminal in Lark of texts in which a pattern of a JSON schema is found.

    `pattern`: regular expression, perhaps with ``^`` at its beginning or ``$`` at its end.
    """
    match = re.fullmatch(r"(\^?)((?:[^\\]|\\.)*?)(\$?)", pattern, re.DOTALL)
    if match is None:
        raise RequestError(f"found the pattern {pattern!r:.100}, expected a regular expression")
    begin, body, end = match.groups()
    return _regex_rule(f"{'' if begin else '(?s:.*)'}({body}){'' if end else '(?s:.*)'}")


def _grammar_rule(grammar: str) -> str:
    _package()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    names = _GBNF_RULE.findall(grammar)
    return f"%lark {{\n{gbnf_to_lark(_distinct_rules(grammar, names)) if names else grammar}\n}}"


def _distinct_rules(grammar: str, names: Iterable[str]) -> str:
    """Rename rules of GBNF to which the package would give another's name in Lark, where ``root`` is ``start``."""
    taken, renamed = {"start"}, {}
    for name in dict.fromkeys(names):
        new = lark = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
        numbers = count(len(taken))
        while new in taken and name != "root":
            new = renamed[name] = f"{lark}_{next(numbers)}"
        taken.add(new)
    return _GBNF_WORD.sub(lambda match: renamed.get(match[0], match[0]), grammar)


def _choice_rule(texts: Sequence[str]) -> str:
    # One terminal: as alternatives of a rule, thousands of texts would be too many.
    return "CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))


FORMS = {
    "json": _Form((Mapping, str), "a JSON schema", _json_rule),
    "regex": _Form((str,), "a regular expression", _regex_rule),
    "choice": _Form((list, tuple), "a list of texts that are not empty", _choice_rule),
    "grammar": _Form((str,), "a grammar in Lark or GBNF", _grammar_rule),
    "json_object": _Form((bool,), "true", lambda _: _json_rule({"type": "object"})),
}
"""Forms of a text, by their name in `StructuredOutputs`."""

_ABSENT: tuple[Any, ...] = (None, False)


@contextmanager
def package_errors(location: str) -> Iterator[None]:
    """Turn errors of llguidance, which include Rust panics, into `RequestError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        text = str(error) or type(error).__name__
        raise RequestError(f"{location}: {text}") from error


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(f"structured output needs the package llguidance; {pip_install('llm')}") from error
    return llguidance


def _on_large_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, whose stack is large."""
    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = ThreadPoolExecutor(1, "relax_hetero.llm grammar")
            future = thread.submit(function)
        finally:
            threading.stack_size(usual)
    thread.shutdown(wait=False)
    return future.result()


def _error_of(matcher: Any) -> str:
    """Error of a matcher, without the state that follows in angle brackets."""
    return str(matcher.get_error()).partition("\n<")[0].strip()


class Constraint:
    """Tokens that may follow the text of one sequence."""

    def __init__(
        self,
        matcher: Any,  # parser of the text so far
        vocabulary: int,
        pool: ThreadPoolExecutor,  # threads that compute masks
        location: str,  # name of the field that asks for it, for errors
    ) -> None:
        self._matcher, self._vocabulary, self._pool, self._location = matcher, vocabulary, pool, location
        self._mask: Future[np.ndarray] = pool.submit(self._compute_mask)

    def mask(self) -> np.ndarray:
        """Wait for the mask of the next token, see `token_masks`."""
        return self._mask.result()

    def advance(self, token: int) -> bool:
        """Append a token; return True if the text is complete, so that nothing may follow.

        Raises RequestError if the grammar needs more time or memory than llguidance allows.
        """
        if not self._matcher.consume_token(token):
            self._raise_error()
        if self._matcher.is_stopped():
            return True
        self._mask = self._pool.submit(self._compute_mask)
        return False

    def _compute_mask(self) -> np.ndarray:
        data = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._raise_error()
        words = np.frombuffer(data, np.int32)
        mask = np.zeros(mask_words(self._vocabulary), np.int32)
        mask[: words.size] = words[: mask.size]
        return mask

    def _raise_error(self) -> None:
        problem = _error_of(self._matcher) or "does not allow the next token"
        raise RequestError(f"{self._location}: {problem}")


class Grammars:
    """Compiles structured outputs for the tokens of one tokenizer. Thread-safe.

    `tokenizer`: tokenizer of the model; `vocabulary`: number of logits of a token, of which those beyond the
    tokenizer's tokens are never allowed.
    """

    def __init__(self, tokenizer: TokenizerProtocol, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, "relax_hetero.llm masks")

    def constraint(self, outputs: StructuredOutputs) -> Constraint:
        """Compile a form, and begin to compute the mask of the first token.

        Raises RequestError if it is not a valid schema, expression or grammar, or the package llguidance is not
        installed, and EngineClosedError after `close`.
        """
        matcher = self._compile(outputs.source, outputs.location).deep_copy()
        try:
            return Constraint(matcher, self._vocabulary, self._pool, outputs.location)
        except RuntimeError as error:  # the threads have ended
            raise EngineClosedError("the engine was closed") from error

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)

    def _compile(self, source: str, location: str) -> Any:
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
                return self._compiled[source]
            if self._tokens is None:
                with package_errors(location):
                    self._tokens = self._make_tokens()
        with package_errors(location):
            matcher = _on_large_stack(lambda: self._make_matcher(source))
        if matcher.is_error():
            raise RequestError(f"{location}: {_error_of(matcher)}")
        with self._lock:
            self._compiled[source] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _make_matcher(self, source: str) -> Any:
        package = _package()
        limits = package.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        grammar = package.LLMatcher.grammar_from_lark(source)
        matcher = package.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # fails for expressions that are too large, and warms the caches of copies
        return matcher

    def _make_tokens(self) -> Any:
        """Trie of the bytes of all tokens, in which control tokens are apart from texts."""
        package = _package()
        tokens = package.TokenizerWrapper(_Tokens(self._tokenizer, self._vocabulary))
        return package.LLTokenizer(tokens, eos_token=self._stops())

    def _stops(self) -> list[int]:
        return sorted(token for token in self._tokenizer.stop_ids if token < self._vocabulary)


class _Tokens:
    """Tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenizerProtocol, vocabulary: int) -> None:
        control = {token: name for name, token in control_tokens(tokenizer).items()}
        self.eos_token_id = min(tokenizer.stop_ids, default=None)
        self.special_token_ids = sorted({*control, *tokenizer.stop_ids} & set(range(vocabulary)))
        self.tokens = [tokenizer.piece(token) for token in range(vocabulary)]
        for token in self.special_token_ids:
            self.tokens[token] = control.get(token, f"<|{token}|>").encode()
        self._tokenizer = tokenizer
        self._byte_tokens = {data: token for token, data in enumerate(self.tokens) if len(data) == 1}

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text in the middle of another; llguidance prefers them where the form leaves no choice."""
        if isinstance(text, bytes):  # the package tries these first
            raise TypeError("expected text")
        data = text.encode()
        for prefix in ("", "\n"):  # tokenizers may add a space before the first word
            tokens, size = self._tokenizer.encode(prefix + text, special=False, begin=False), 0
            for index in reversed(range(len(tokens))):
                size += len(self.tokens[tokens[index]])
                if size >= len(data):
                    break
            suffix = tokens[index:] if tokens else []
            if b"".join(self.tokens[token] for token in suffix) == data:
                return suffix
        return [self._byte_tokens[data[index : index + 1]] for index in range(len(data))]
