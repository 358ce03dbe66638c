"""``relax-hetero chat``: a conversation with a language model in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ..display.console import console
from ..errors import HeteroError, printable
from .command import command, refuse_overwriting
from .language_model import Chosen, language_model_options

if TYPE_CHECKING:
    from ..llm import ChatTemplate, Engine, Request, SamplingParams

Piece: TypeAlias = tuple[str, int, float]
"""Text, its tokens, and the seconds since the piece before or, of the first, since the question."""

_HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer"


@command("chat")
@language_model_options
@click.option("--system", metavar="TEXT", help="System prompt: instructions that come before the conversation.")
@click.option("--prompt", "-p", metavar="TEXT", help="Send this text, print the answer on stdout, and exit.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Maximum number of tokens of one answer.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.8,
    show_default=True,
    help="Sampling temperature; 0 always takes the most likely token.",
)
@click.option(
    "--top-k", type=int, default=40, show_default=True, help="Sample from the k most likely tokens; 0 means all."
)
@click.option(
    "--top-p",
    type=float,
    default=0.95,
    show_default=True,
    help="Sample from the most likely tokens whose probabilities add up to this.",
)
@click.option(
    "--min-p",
    type=float,
    default=0.05,
    show_default=True,
    help="Sample from tokens at least this fraction as likely as the most likely one.",
)
@click.option(
    "--repetition-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="Divide the logits of tokens that occurred by this; 1 means no penalty.",
)
@click.option("--seed", type=int, help="Seed of the sampling; the same seed gives the same answers.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At the end, write a page for a browser: the times of the answers, and their text.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text. Repeatable.")
def chat_command(
    chosen: Chosen,
    system: str | None,
    prompt: str | None,
    raw: bool,
    html: Path | None,
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Talk with MODEL, a GGUF file or the folder of a compiled model.

    \b
    relax-hetero chat model.gguf
    relax-hetero chat model.gguf --vdevice llvm --vdevice cuda --placement 'blk.[0-8].*=cuda' -p 'Who are you?'
    """
    from ..llm import Engine, SamplingParams

    params = SamplingParams(stop=stop, **sampling)
    if raw and (system is not None or chosen.template is not None):
        raise click.UsageError("--raw knows no conversation: --system and --chat-template do not go with it")
    if html is not None:
        from ..report.written_report import report_path

        refuse_overwriting(report_path(html), chosen.path)
    model, tokenizer = chosen.load()
    template = None if raw else chosen.chat_template(tokenizer)
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
                _write_page(html, chosen.path.stem, conversation.answers)


def _write_page(path: Path, title: str, answers: list[tuple[Request, list[Piece]]]) -> None:
    from ..report.call_times import Answer, chat_report
    from ..report.page import page_of
    from ..report.written_report import write_page

    told = [
        Answer(usage.prompt_tokens, usage.cached_tokens, times.first_token - times.submitted, tuple(pieces))
        for request, pieces in answers
        for usage, times in [(request.usage, request.times)]
        if times.first_token  # else the answer was ended before it began
    ]
    write_page(page_of(chat_report(title, told)), path)
    console(stderr=True).print(f"Wrote {path}: open it in a browser.", markup=False)


class Conversation:
    """Messages so far.

    Parameters
    ----------
    engine : Engine
    template : ChatTemplate or None
        None where texts are gone on with as they are.
    params : SamplingParams
        Parameters of each answer.
    system : str or None
        Text for the model before the conversation.

    Attributes
    ----------
    answers : list of (Request, list of Piece)
        The answers so far, and the pieces that they came in.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate | None, params: SamplingParams, system: str | None
    ) -> None:
        self._engine, self._template, self._params, self._system = engine, template, params, system
        self._messages: list[dict[str, str]] = []
        self.answers: list[tuple[Request, list[Piece]]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def reply(self, text: str) -> None:
        """Say something, and print the answer as it comes; Ctrl-C ends it.

        What was said is forgotten if the model cannot answer it.

        Raises
        ------
        HeteroError
            As the engine and the template do.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        request = self._engine.submit(text if self._template is None else self._template.render(messages), self._params)
        pieces = _printed(request)
        self._messages = [*messages, {"role": "assistant", "content": "".join(text for text, *_ in pieces)}]
        self.answers.append((request, pieces))
        console(stderr=True).print(_speed(request), style="dim", markup=False)


def converse(conversation: Conversation) -> None:
    """Read what is said line by line until the end of the input."""
    screen = console(stderr=True)
    screen.print(_HELP, style="dim", markup=False)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/reset":
            conversation.reset()
            screen.print("the conversation begins anew", style="dim")
        elif text.startswith("/"):
            screen.print(_HELP, style="dim", markup=False)
        elif text:
            try:
                conversation.reply(text)
            except HeteroError as error:
                screen.print(f"error: {error}", style="red", markup=False)


def _printed(request: Request) -> list[Piece]:
    """The answer in the pieces that it came in."""
    pieces: list[Piece] = []
    before = request.times.submitted
    try:
        for delta in request:
            now = time.monotonic()
            pieces.append((delta.text, len(delta.tokens), now - before))
            before = now
            # A model may write commands for the terminal, too.
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
    found = f"{usage.completion_tokens} tokens"
    if usage.completion_tokens > 1 and end > first:
        found += f", {(usage.completion_tokens - 1) / (end - first):.1f} tokens/s"
    prompt = usage.prompt_tokens - usage.cached_tokens
    return f"{found}; prompt of {usage.prompt_tokens} ({prompt} new) in {first - times.submitted:.2f} s"
