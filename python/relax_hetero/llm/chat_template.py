"""Chat templates: a model's jinja2 template turns messages into a prompt.

Templates are not trusted: each runs in jinja2's sandbox, in a process of its own with limited memory and time
(`template_worker`). Text of a user never becomes a control token, such as the end of a turn: names of control tokens
are encoded as these tokens only where the template itself writes them (`Prompt`).
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

from ..errors import pip_install
from ..system import HAS_PROCESS_LIMITS
from . import template_worker
from .errors import RequestError, TokenizerError
from .json_tokenizer import JsonTokenizer
from .special_tokens import NONCHARACTERS, Prompt, begin_and_end
from .template_worker import ANSWER, BEYOND_LIMITS, DONE, FAILED, MAX_ANSWER, MAX_LITERAL, REFUSED, REQUEST
from .tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. Their names are trusted as the template's own text, unlike the rest of a message."""

# Templates for files without one, by a token that identifies the family of the model.
_TEMPLATE_BY_TOKEN = {
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


_ENVIRONMENT_NAMES = ("LD_LIBRARY_PATH", "TZ")
"""Environment variables that a template's process gets; others may hold API keys."""
_MAX_NAME_CHARACTERS = 1 << 18
"""Maximum total length of control tokens' names for which `_Marks` leaves texts unmarked; some thousands are usual."""
CPU_SECONDS, WALL_SECONDS = 2.0, 5.0
"""Limits of processor time and elapsed time for rendering a prompt, and for compiling the template."""
_EXIT_SECONDS = 1.0  # time after which a process that does not exit is killed
_REASON_BY_CODE = {template_worker.BEYOND_MEMORY: template_worker.MEMORY_TEXT}
if HAS_PROCESS_LIMITS:
    _REASON_BY_CODE[-signal.SIGPROF] = f"takes more than {CPU_SECONDS:g} s of processor time"
    _REASON_BY_CODE[-signal.SIGALRM] = f"takes more than {WALL_SECONDS:g} s"


class ChatTemplate:
    """Renders messages as a prompt.

    Thread-safe. Its process starts at once, ends with this object or this process, and is restarted after the template
    has exceeded its memory or time.

    Parameters
    ----------
    source : str
        Template in jinja2, as in the Hugging Face hub's models.
    names : mapping of str to str, optional
        Names of special tokens that the template may use, such as ``bos_token``.
    control_names : collection of str
        Names of control tokens, which are plain text in a message.
    origin : str
        Source of the template, for the attribute of this name.

    Attributes
    ----------
    source : str
        Template in jinja2; empty if there is none.
    origin : str
        Source of the template: "given", "file", "guessed from <|im_start|>", "missing", or "unusable: " and a reason.
    guessed_from : str or None
        Special token by which a template was chosen for a file without one; None for other templates.
    fault : TokenizerError or None
        Reason why it cannot render; None if it can.

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
        self.source, self.origin = source, origin
        self.guessed_from: str | None = None
        self.fault: TokenizerError | None = None
        self._names = dict(names or {})
        self._worker = _Worker(source)
        status, answer = self._worker.start()
        if status != DONE:
            raise TokenizerError(f"the chat template is invalid: {'it ' if status == BEYOND_LIMITS else ''}{answer}")
        self._marks = _Marks([name for name in control_names if name], json.loads(answer), source)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer | JsonTokenizer, source: str | None = None) -> ChatTemplate:
        """Make the template of a file, or one that fits its special tokens.

        Parameters
        ----------
        tokenizer : Tokenizer or JsonTokenizer
            Tokenizer with the file's template and special tokens.
        source : str, optional
            Template to use instead of the file's.

        Raises
        ------
        TokenizerError
            If there is neither, or the source is not a template, or a short conversation exceeds the limits.
        """
        origin = "given" if source else "file"
        source = source or tokenizer.chat_template or None
        if source is not None and not isinstance(source, str):
            raise TokenizerError(f"tokenizer.chat_template: found {source!r:.100}, expected text")
        guess = None
        if source is None:
            guess = next((name for name in _TEMPLATE_BY_TOKEN if tokenizer.token(name) is not None), None)
            if guess is None:
                tokens = ", ".join(_TEMPLATE_BY_TOKEN)
                raise TokenizerError(
                    f"found no chat template in the file, nor one of the tokens {tokens}: expected a template"
                )
            origin, source = f"guessed from {guess}", _TEMPLATE_BY_TOKEN[guess]
        control_names = getattr(tokenizer, "control_names", ())
        template = cls(source, begin_and_end(tokenizer), control_names, origin)
        template.guessed_from = guess
        status, answer, _ = template._render_with_status([{"role": "user", "content": "Hi"}], {})
        if status == BEYOND_LIMITS:
            raise TokenizerError(f"the chat template is invalid: for a short conversation it {answer}")
        return template

    @classmethod
    def find(cls, tokenizer: Tokenizer | JsonTokenizer, source: str | None = None) -> ChatTemplate:
        """Make a template as `from_tokenizer` does, but keep an error as its `fault`, which `render` raises.

        Parameters
        ----------
        tokenizer, source
            As for `from_tokenizer`.
        """
        try:
            return cls.from_tokenizer(tokenizer, source)
        except TokenizerError as error:
            template = cls.__new__(cls)
            template.source, template.fault, template.guessed_from = "", error, None
            template.origin = "missing" if not (source or tokenizer.chat_template) else f"unusable: {error}"
            return template

    def render(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> Prompt:
        """Render messages as a prompt that ends where the model's turn begins.

        Parameters
        ----------
        messages : sequence of mapping of str to object
            Messages with a ``role``, one of `ROLES`, and a ``content``.
        values : object
            Further values for the template, such as ``tools`` or ``add_generation_prompt=False``.

        Returns
        -------
        Prompt
            Text with control tokens only where the template wrote their names.

        Raises
        ------
        RequestError
            If the template refuses the messages, or fails on them.
        TokenizerError
            If the template has a `fault`.
        """
        if self.fault is not None:
            raise TokenizerError(str(self.fault)) from self.fault
        status, answer, marker = self._render_with_status(messages, values)
        if status != DONE:
            verb = {REFUSED: "refuses them: ", BEYOND_LIMITS: ""}.get(status, "fails on them: ")
            raise RequestError(f"messages: the model's chat template {verb}{answer}")
        parts = answer.split(marker)
        marks = array("Q", accumulate(map(len, parts[:-1])))
        return Prompt("".join(parts), marks)

    def _render_with_status(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> tuple[int, str, str]:
        """Return a status, an answer, and the character that marks user text."""
        try:
            for message in messages:
                role = message.get("role") if isinstance(message, Mapping) else None
                if not isinstance(role, str) or role not in ROLES:
                    raise RequestError(f"messages: found role {role!r:.100}, expected one of {', '.join(ROLES)}")
            marked, marker = self._marks.mark_values({**values, "messages": list(messages)})
            for message, original in zip(marked["messages"], messages, strict=True):
                message["role"] = original["role"]
            request = json.dumps({**_DEFAULT_VALUES, **self._names, **marked}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: found a value that JSON cannot hold: {error}") from error
        return *self._worker.render(request), marker


_DEFAULT_VALUES = {"add_generation_prompt": True, "tools": None, "documents": None}
"""Values that every template gets, as in transformers."""


class _Marks:
    """Inserts marks into text of users wherever it could be part of a control token's name.

    A mark follows each character with which a name begins, and precedes each with which one ends. So a name that arises
    only when the template joins, splits or trims texts contains a mark, too. Texts that the template itself searches
    for, such as ``</think>``, stay unmarked, unless they overlap a control token's name. `names`: names of control
    tokens; `literals`: string literals in the template's expressions; `source`: source of the template.
    """

    def __init__(self, names: Sequence[str], literals: Iterable[str], source: str) -> None:
        reserved = "".join((source, *names))
        self._markers = [marker for marker in NONCHARACTERS if marker not in reserved]
        self._first_characters, self._last_characters = {name[0] for name in names}, {name[-1] for name in names}
        self._identifiers = [name for name in names if name.isidentifier()]
        self._unmarked_texts: list[str] = []
        if sum(map(len, names)) > _MAX_NAME_CHARACTERS:
            return
        prefixes = {name[:length] for name in names for length in range(1, min(len(name), MAX_LITERAL) + 1)}
        suffixes = {name[-length:] for name in names for length in range(1, min(len(name), MAX_LITERAL) + 1)}
        for text in sorted(literals, key=len, reverse=True):
            overlaps = any(text[i:] in prefixes or text[: i + 1] in suffixes for i in range(len(text)))
            if self._mark_text(text, "\0") != text and not overlaps:
                if not any(name in text or text in name for name in names):
                    self._unmarked_texts.append(text)

    def mark_values(self, values: Any) -> tuple[Any, str]:
        """Mark all texts in JSON values; return the values and the marker.

        Raises RequestError if the texts use every possible marker.
        """
        for marker in self._markers:
            try:
                return self._mark(values, marker), marker
            except _MarkerInTextError:
                continue
        raise RequestError("messages: found all noncharacters of Unicode from U+FDD0 to U+FDEF, expected text")

    def _mark(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            if marker in value:
                raise _MarkerInTextError
            marked = self._mark_text(value, marker)
            for text in self._unmarked_texts if marked != value else ():
                marked = marked.replace(self._mark_text(text, marker), text)
            return marked
        if isinstance(value, Mapping):
            return {self._mark_key(key, marker): self._mark(each, marker) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(each, marker) for each in value]
        return value

    def _mark_key(self, key: Any, marker: str) -> Any:
        # Templates look up keys by name, so ordinary names stay unmarked.
        is_plain = isinstance(key, str) and key.isidentifier() and not any(name in key for name in self._identifiers)
        return key if is_plain else self._mark(key, marker)

    def _mark_text(self, text: str, marker: str) -> str:
        for character in self._first_characters:
            text = text.replace(character, character + marker)
        for character in self._last_characters:
            text = text.replace(character, marker + character)
        return text


class _MarkerInTextError(Exception):
    """Raised where a text contains the marker."""


class _Worker:
    """Process of a template, which renders one prompt at a time. `source`: source of the template."""

    def __init__(self, source: str) -> None:
        if not HAS_PROCESS_LIMITS:
            raise TokenizerError(
                "chat templates of models are programs, which run in a process with limits of time and memory: found "
                f"{sys.platform}, which has none; expected Linux or macOS"
            )
        folders = []
        for package in ("jinja2", "markupsafe"):
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                raise TokenizerError(f"chat templates need the package jinja2; {pip_install('llm')}")
            folders.append(str(Path(spec.origin).parents[1]))
        self._setup = json.dumps({"path": list(dict.fromkeys(folders)), "source": source}).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._close: Callable[[], object] = lambda: None
        self._owner_pid = 0

    def start(self) -> tuple[int, str]:
        """Start the process; return a status, and the literals of the template (as JSON) or an error."""
        self._close()
        seconds = map(str, (CPU_SECONDS, WALL_SECONDS))
        command = [sys.executable, "-I", "-S", "-B", template_worker.__file__, *seconds]
        environment = {name: os.environ[name] for name in _ENVIRONMENT_NAMES if name in os.environ}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            raise TokenizerError(f"chat templates need a process, which cannot be started: {error}") from error
        self._process, self._owner_pid = process, os.getpid()
        self._close = weakref.finalize(self, _close_process, process, self._owner_pid)
        return self._exchange(process, self._setup)

    def render(self, request: bytes) -> tuple[int, str]:
        """Return a status, and a prompt or an error."""
        with self._lock:
            # After os.fork, the child must not share its parent's worker.
            if self._process is None or self._owner_pid != os.getpid() or self._process.poll() is not None:
                status, answer = self.start()
                if status != DONE:
                    return status, answer
            return self._exchange(self._process, request)  # type: ignore[arg-type]

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[int, str]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(REQUEST.pack(len(request)) + request)
            process.stdin.flush()
            header = process.stdout.read(ANSWER.size)
            status, length = ANSWER.unpack(header) if len(header) == ANSWER.size else (FAILED, MAX_ANSWER + 1)
            data = process.stdout.read(length) if length <= MAX_ANSWER else b""
            if len(data) == length:
                if status == BEYOND_LIMITS:  # the process would keep the memory that it has allocated
                    self._close()
                return status, data.decode("utf-8", "surrogatepass")
        except OSError:  # the process has exited
            pass
        except BaseException:  # such as Ctrl-C: the next request would read this one's answer
            self._close()
            raise
        self._close()
        return BEYOND_LIMITS, _REASON_BY_CODE.get(process.returncode, f"ended its process (code {process.returncode})")


def _close_process(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    """Close a worker's pipes, which lets it exit, and wait for it."""
    if os.getpid() != owner_pid:
        return
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
