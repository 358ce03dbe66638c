"""``relax-hetero chat``: a conversation with a language model in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ..display.console import console
from ..display.text import plural
from ..errors import HeteroError, printable
from .command import OUTPUT, command, refuse_overwriting
from .language_model import LanguageModelOptions, language_model_options

if TYPE_CHECKING:
    from ..llm import ChatTemplate, Engine, Request, SamplingParams

Piece: TypeAlias = tuple[str, int, float]
"""Text, number of its tokens, and seconds since the previous piece, or since the question for the first one."""

_HELP = "/reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer"


@command("chat")
@language_model_options
@click.option("--system", metavar="TEXT", help="System prompt: instructions that come before the conversation.")
@click.option("--prompt", "-p", metavar="TEXT", help="Send this text, print the answer on stdout, and exit.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=1024, help="Maximum number of tokens of one answer.")
@click.option(
    "--temperature", type=float, default=0.8, help="Sampling temperature; 0 always takes the most likely token."
)
@click.option("--top-k", type=int, default=40, help="Sample from the k most likely tokens; 0 means all.")
@click.option(
    "--top-p", type=float, default=0.95, help="Sample from the most likely tokens whose probabilities add up to this."
)
@click.option(
    "--min-p",
    type=float,
    default=0.05,
    help="Sample from tokens at least this fraction as likely as the most likely one.",
)
@click.option(
    "--repetition-penalty",
    type=float,
    default=1.0,
    help="Divide the logits of tokens that occurred by this; 1 means no penalty.",
)
@click.option("--seed", type=int, help="Seed of the sampling; the same seed gives the same answers.")
@click.option(
    "--html",
    type=OUTPUT,
    metavar="FILE",
    help="At the end, write a page for a browser: the times of the answers, and their text.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text. Repeatable.")
def chat_command(
    model_options: LanguageModelOptions,
    system: str | None,
    prompt: str | None,
    raw: bool,
    html: Path | None,
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Talk with MODEL: a GGUF file, or a folder of Hugging Face, with an ONNX decoder, or of a compiled model.

    \b
    relax-hetero chat model.gguf
    relax-hetero chat model.gguf --vdevice llvm --vdevice cuda --placement 'blk.[0-8].*=cuda' -p 'Who are you?'
    """
    from ..llm import Engine, SamplingParams

    params = SamplingParams(stop=stop, **sampling)
    if raw and (system is not None or model_options.template is not None):
        raise click.UsageError("--raw works without a chat template: --system and --chat-template do not go with it")
    if html is not None:
        from ..report.written_report import report_path

        refuse_overwriting(report_path(html), model_options.path)
    model, tokenizer = model_options.load()
    template = None if raw else model_options.chat_template(tokenizer)
    if template is not None and template.fault is not None:
        raise template.fault
    with Engine(model, tokenizer, prefixes=1) as engine:
        conversation = Conversation(engine, template, params, system)
        try:
            if prompt is None:
                converse(conversation)
            else:
                conversation.reply(prompt)
        finally:
            if html is not None and conversation.answers:
                _write_page(html, model_options.path.stem, conversation.answers)


def _write_page(path: Path, title: str, answers: list[tuple[Request, list[Piece]]]) -> None:
    from ..report.call_times import Answer, chat_report
    from ..report.page import page_of
    from ..report.written_report import write_page

    records = [
        Answer(usage.prompt_tokens, usage.cached_tokens, times.first_token - times.submitted, tuple(pieces))
        for request, pieces in answers
        for usage, times in [(request.usage, request.times)]
        if times.first_token  # else it was cancelled before it began
    ]
    write_page(page_of(chat_report(title, records)), path)
    console(stderr=True).print(f"Wrote {path}: open it in a browser.", markup=False)


class Conversation:
    """Messages of a conversation, and the answers to them."""

    def __init__(
        self,
        engine: Engine,  # engine of the model
        template: ChatTemplate | None,  # chat template; None completes texts as they are
        params: SamplingParams,
        system: str | None,
    ) -> None:
        self._engine, self._template, self._params, self._system = engine, template, params, system
        self._messages: list[dict[str, str]] = []
        self.answers: list[tuple[Request, list[Piece]]] = []  # answers so far, and their pieces
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def reply(self, text: str) -> None:
        """Send a message, and print the answer as it comes; Ctrl-C ends it.

        The message is dropped if there is an error. Raises HeteroError if the engine or the template raises it.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        request = self._engine.submit(text if self._template is None else self._template.render(messages), self._params)
        pieces = _print_answer(request)
        self._messages = [*messages, {"role": "assistant", "content": "".join(text for text, *_ in pieces)}]
        self.answers.append((request, pieces))
        console(stderr=True).print(_speed(request), style="dim", markup=False)


def converse(conversation: Conversation) -> None:
    """Read messages line by line from stdin."""
    stderr = console(stderr=True)
    stderr.print(_HELP, style="dim", markup=False)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            conversation.reset()
            stderr.print("new conversation", style="dim")
        elif text.startswith("/"):
            stderr.print(_HELP, style="dim", markup=False)
        elif text:
            try:
                conversation.reply(text)
            except HeteroError as error:
                stderr.print(f"error: {error}", style="red", markup=False)


def _print_answer(request: Request) -> list[Piece]:
    """Print an answer as it comes; return its pieces."""
    pieces: list[Piece] = []
    before = request.times.submitted
    try:
        for delta in request:
            now = time.monotonic()
            pieces.append((delta.text, len(delta.tokens), now - before))
            before = now
            # A model may generate escape sequences for the terminal.
            click.echo(printable(delta.text), nl=False)
    except KeyboardInterrupt:
        request.cancel()
        request.result(10)
    click.echo()
    return pieces


def _speed(request: Request) -> str:
    usage, times = request.usage, request.times
    end = times.finished or time.monotonic()
    first = times.first_token or end
    text = plural(usage.completion_tokens, "token")
    if usage.completion_tokens > 1 and end > first:
        text += f", {(usage.completion_tokens - 1) / (end - first):.1f} tokens/s"
    new = usage.prompt_tokens - usage.cached_tokens
    return f"{text}; prompt of {usage.prompt_tokens} ({new} new) in {first - times.submitted:.2f} s"
