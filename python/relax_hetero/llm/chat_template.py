"""Conversations as prompts, by templates of jinja2 in its sandbox: a template comes with a model, from anybody."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RequestError, TokenizerError
from .tokenizer import Tokenizer

LONGEST = 64 << 20
"""Characters of a prompt at which a template is stopped."""

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


class ChatTemplate:
    """Makes a prompt of a conversation.

    Parameters
    ----------
    source: In the language of jinja2, as models of the Hugging Face hub have it.
    names: Names of special tokens that the template may use, such as ``bos_token``.

    Attributes
    ----------
    guessed_from: The special token for which the template was chosen, since the file has none; None if it was given.

    Raises
    ------
    TokenizerError: If it is none.
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError as error:
            raise TokenizerError("chat templates need the package jinja2; pip install 'relax-hetero[llm]'") from error
        self._failures = jinja2.TemplateError
        self._names = dict(names or {})
        self.guessed_from: str | None = None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template is none: {error}") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template of a file, or one that fits its special tokens.

        Raises
        ------
        TokenizerError: If there is neither.
        """
        special = {"bos_token": tokenizer.begin_id, "eos_token": min(tokenizer.stop_ids, default=None)}
        names = {name: tokenizer.names[token] for name, token in special.items() if token is not None}
        source, guessed_from = source or tokenizer.chat_template, None
        if source is None:
            guessed_from = next((name for name in _KNOWN if tokenizer.token(name) is not None), None)
            if guessed_from is None:
                tokens = ", ".join(_KNOWN)
                raise TokenizerError(
                    f"found no chat template in the file, nor one of the tokens {tokens}: expected one"
                )
            source = _KNOWN[guessed_from]
        made = cls(source, {"bos_token": "", "eos_token": "", **names})
        made.guessed_from = guessed_from
        return made

    def render(self, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> str:
        """The prompt after which the model's turn begins.

        Parameters
        ----------
        messages: Each has a ``role`` and a ``content``.
        values: For the template, such as ``tools``, or ``add_generation_prompt=False`` without the begin of a turn.

        Raises
        ------
        RequestError: If the template refuses the conversation.
        """
        given = {"add_generation_prompt": True, **self._names, **values, "messages": [dict(m) for m in messages]}
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(given):
                parts.append(part)
                length += len(part)
                if length > LONGEST:
                    raise RequestError(f"messages: found a prompt of more than {LONGEST:,} characters")
        except (
            self._failures,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            RecursionError,
            OverflowError,
        ) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error
        return "".join(parts)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Other than jinja2's own, without escapes for HTML.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
