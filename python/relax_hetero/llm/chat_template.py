"""Conversations as prompts, by templates of jinja2, which come with a model, from anybody.

A template runs in its sandbox and in a process of its own (`template_worker`), which has little memory and time. What a
user says never becomes a control token, such as one that ends a turn: names of control tokens count only where the
template itself writes them (`Prompt`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from . import template_worker
from .errors import RequestError, TokenizerError
from .special_tokens import NONCHARACTERS, Prompt
from .template_worker import (
    ANSWER,
    BEYOND_LIMITS,
    DONE,
    FAILED,
    MAX_ANSWER,
    MAX_LITERAL,
    REFUSED,
    REQUEST,
)
from .tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak; templates write these names, unlike all else of a message, as their own text."""

# Templates of files that have none, by a token that tells how they were trained.
_KNOWN = {
    "<start_of_turn>": (
        "{{ bos_token }}{% for m in messages %}"
        "{% set role = 'model' if m.role == 'assistant' else 'user' %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "<|im_start|>": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "<|start_header_id|>": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}


_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")
"""Variables of the environment that the process of a template gets: keys of servers stay here."""
_MAX_CHARACTERS = 1 << 18
"""Length of all names of control tokens together, beyond which no text of a template stays whole; some thousands are
usual."""
CPU_SECONDS, WALL_SECONDS = 2.0, 5.0
"""Limits of one prompt, and of reading the template."""
_EXIT_SECONDS = 1.0
"""Time until a process that is told to end is killed."""
_WHY_ENDED = {
    -signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s of processor time",
    -signal.SIGALRM: f"takes more than {WALL_SECONDS:g} s",
}


class ChatTemplate:
    """Makes a prompt of a conversation.

    Any thread may call it. Its process is started at once, ends with this object or this process, and is started again
    when a template has taken more memory or time than it may.

    Parameters
    ----------
    source : str
        In the language of jinja2, as models of the Hugging Face hub have it.
    names : mapping of str to str, optional
        Names of special tokens that the template may use, such as ``bos_token``.
    control_names : collection of str
        Names of control tokens, which count in a prompt only where the template writes them.
    origin : str
        Source of the template, for the attribute of this name.

    Attributes
    ----------
    origin : str
        Source of the template: "given", "file", "guessed from <|im_start|>", "missing", or "unusable: ", and why.
    guessed_from : str or None
        The special token for which the template was chosen, since the file has none; None if it has one.
    fault : TokenizerError or None
        Reason why it makes no prompts, a `TokenizerError`; None if it makes them.

    Raises
    ------
    TokenizerError
        If the source is not a template.
    """

    def __init__(
        self,
        source: str,
        names: Mapping[str, str] | None = None,
        control_names: Collection[str] = (),
        origin: str = "given",
    ) -> None:
        self.origin = origin
        self.guessed_from: str | None = None
        self.fault: TokenizerError | None = None
        self._names = dict(names or {})
        self._worker = _Worker(source)
        status, answer = self._worker.start()
        if status != DONE:
            raise TokenizerError(f"the chat template is none: {'it ' if status == BEYOND_LIMITS else ''}{answer}")
        self._marks = _Marks([name for name in control_names if name], json.loads(answer), source)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template of a file, or one that fits its special tokens.

        Parameters
        ----------
        tokenizer : Tokenizer
            Tokenizer with the file's template and special tokens.
        source : str, optional
            A template in place of the file's.

        Raises
        ------
        TokenizerError
            If there is neither, or the source is not a template, or a short conversation takes more memory or time than
            it may.
        """
        special = {"bos_token": tokenizer.begin_id, "eos_token": min(tokenizer.stop_ids, default=None)}
        names = {name: tokenizer.names[token] for name, token in special.items() if token is not None}
        origin = "given" if source else "file"
        source = source or tokenizer.chat_template or None
        if source is not None and not isinstance(source, str):
            raise TokenizerError(f"tokenizer.chat_template: found {source!r:.100}, expected text")
        guess = None
        if source is None:
            guess = next((name for name in _KNOWN if tokenizer.token(name) is not None), None)
            if guess is None:
                known = ", ".join(_KNOWN)
                raise TokenizerError(
                    f"found no chat template in the file, nor one of the tokens {known}: expected a template"
                )
            origin, source = f"guessed from {guess}", _KNOWN[guess]
        control_names = getattr(tokenizer, "control_names", ())
        made = cls(source, {"bos_token": "", "eos_token": "", **names}, control_names, origin)
        made.guessed_from = guess
        status, answer, _ = made._ask([{"role": "user", "content": "Hi"}], {})
        if status == BEYOND_LIMITS:
            raise TokenizerError(f"the chat template is none: for a short conversation it {answer}")
        return made

    @classmethod
    def find(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """Find a template as `of` does; its errors become the `fault` of a template, which `render` raises.

        Parameters
        ----------
        tokenizer, source
            As `of` takes them.
        """
        try:
            return cls.of(tokenizer, source)
        except TokenizerError as error:
            made = cls.__new__(cls)
            made.fault, made.guessed_from = error, None
            made.origin = "missing" if not (source or tokenizer.chat_template) else f"unusable: {error}"
            return made

    def render(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> Prompt:
        """The prompt after which the model's turn begins.

        Parameters
        ----------
        messages : sequence of mapping of str to object
            Each has a ``role``, one of `ROLES`, and a ``content``.
        values : object
            For the template, such as ``tools``, or ``add_generation_prompt=False`` without the begin of a turn.

        Returns
        -------
        Prompt
            Text with control tokens only where the template wrote their names.

        Raises
        ------
        RequestError
            If the template refuses the conversation, or fails on it.
        TokenizerError
            If there is no template that works.
        """
        if self.fault is not None:
            raise TokenizerError(str(self.fault)) from self.fault
        status, answer, marker = self._ask(messages, values)
        if status != DONE:
            verb = {REFUSED: "refuses them: ", BEYOND_LIMITS: ""}.get(status, "fails on them: ")
            raise RequestError(f"messages: the model's chat template {verb}{answer}")
        parts = answer.split(marker)
        return Prompt("".join(parts), array("Q", accumulate(map(len, parts[:-1]))))

    def _ask(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> tuple[int, str, str]:
        """A status, an answer, and the character that marks what users wrote."""
        try:
            for message in messages:
                role = message.get("role") if isinstance(message, Mapping) else None
                if not isinstance(role, str) or role not in ROLES:
                    raise RequestError(f"messages: found role {role!r:.100}, expected one of {', '.join(ROLES)}")
            marked, marker = self._marks.marked({**values, "messages": list(messages)})
            for message, given in zip(marked["messages"], messages, strict=True):
                message["role"] = given["role"]
            request = json.dumps({**_ALWAYS, **self._names, **marked}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: found what JSON cannot say: {error}") from error
        return *self._worker.ask(request), marker


_ALWAYS = {"add_generation_prompt": True, "tools": None, "documents": None}
"""Values that every template gets, as in transformers."""


class _Marks:
    """Puts a mark into all that could be a part of a control token's name: after its first character, before its last.

    Names that come together only when the template joins, splits or trims texts have a mark, too. Texts that the
    template itself looks for, such as ``</think>``, stay whole, unless they are or touch a control token.

    Parameters
    ----------
    names : sequence of str
        Names of control tokens.
    literals : iterable of str
        Texts that the template's expressions hold.
    source : str
        Source of the template.
    """

    def __init__(self, names: Sequence[str], literals: Iterable[str], source: str) -> None:
        used = "".join((source, *names))
        self._markers = [marker for marker in NONCHARACTERS if marker not in used]
        self._firsts, self._lasts = {name[0] for name in names}, {name[-1] for name in names}
        self._words = [name for name in names if name.isidentifier()]
        self._originals: list[str] = []
        if sum(map(len, names)) > _MAX_CHARACTERS:
            return
        begins = {name[:end] for name in names for end in range(1, min(len(name), MAX_LITERAL) + 1)}
        ends = {name[-size:] for name in names for size in range(1, min(len(name), MAX_LITERAL) + 1)}
        for text in sorted(literals, key=len, reverse=True):
            touches = any(text[at:] in begins or text[: at + 1] in ends for at in range(len(text)))
            if self._broken(text, "\0") != text and not touches:
                if not any(name in text or text in name for name in names):
                    self._originals.append(text)

    def marked(self, values: Any) -> tuple[Any, str]:
        """Values in which all texts have marks, and the mark.

        Raises
        ------
        RequestError
            If texts use all characters that can be marks.
        """
        for marker in self._markers:
            try:
                return self._mark(values, marker), marker
            except _MarkerIsUsed:
                continue
        raise RequestError("messages: found all noncharacters of Unicode from U+FDD0 to U+FDEF, expected text")

    def _mark(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            if marker in value:
                raise _MarkerIsUsed
            broken = self._broken(value, marker)
            for text in self._originals if broken != value else ():
                broken = broken.replace(self._broken(text, marker), text)
            return broken
        if isinstance(value, Mapping):
            return {self._mark_key(key, marker): self._mark(each, marker) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(each, marker) for each in value]
        return value

    def _mark_key(self, key: Any, marker: str) -> Any:
        # Templates look for keys by their names.
        is_plain = isinstance(key, str) and key.isidentifier() and not any(name in key for name in self._words)
        return key if is_plain else self._mark(key, marker)

    def _broken(self, text: str, marker: str) -> str:
        for character in self._firsts:
            text = text.replace(character, character + marker)
        for character in self._lasts:
            text = text.replace(character, marker + character)
        return text


class _MarkerIsUsed(Exception):
    """A text has the character that would mark it."""


class _Worker:
    """The process of a template, which answers one call after the other.

    Parameters
    ----------
    source : str
        Source of the template.
    """

    def __init__(self, source: str) -> None:
        folders = []
        for package in ("jinja2", "markupsafe"):
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:
                raise TokenizerError("chat templates need the package jinja2; pip install 'relax-hetero[llm]'")
            folders.append(str(Path(found.origin).parents[1]))
        self._setup = json.dumps({"path": list(dict.fromkeys(folders)), "source": source}).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._owner = 0

    def start(self) -> tuple[int, str]:
        """A status, and the texts of the template's expressions or what is wrong with it."""
        self._stop()
        seconds = map(str, (CPU_SECONDS, WALL_SECONDS))
        command = [sys.executable, "-I", "-S", "-B", template_worker.__file__, *seconds]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            raise TokenizerError(f"chat templates need a process, which cannot be started: {error}") from error
        self._process, self._owner = process, os.getpid()
        self._stop = weakref.finalize(self, _end, process, self._owner)
        return self._exchange(process, self._setup)

    def ask(self, request: bytes) -> tuple[int, str]:
        """A status, and a prompt or what is wrong with the request."""
        with self._lock:
            # A process that was forked from the one that started it has none of its own.
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                status, answer = self.start()
                if status != DONE:
                    return status, answer
            return self._exchange(self._process, request)  # type: ignore[arg-type]

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[int, str]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(REQUEST.pack(len(request)) + request)
            process.stdin.flush()
            head = process.stdout.read(ANSWER.size)
            status, length = ANSWER.unpack(head) if len(head) == ANSWER.size else (FAILED, MAX_ANSWER + 1)
            data = process.stdout.read(length) if length <= MAX_ANSWER else b""
            if len(data) == length:
                if status == BEYOND_LIMITS:  # it keeps what it took
                    self._stop()
                return status, data.decode("utf-8", "surrogatepass")
        except OSError:  # it has ended
            pass
        except BaseException:  # such as Ctrl-C: nobody would read its answer
            self._stop()
            raise
        self._stop()
        return BEYOND_LIMITS, _WHY_ENDED.get(process.returncode, f"ended its process (code {process.returncode})")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, which does so itself at the end of its input."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
