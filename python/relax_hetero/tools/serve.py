"""``relax-hetero serve``: the OpenAI endpoints over a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..errors import HeteroError
from .command import command
from .console import console
from .language_model import Chosen, language_model_options
from .placing import BytesParam

if TYPE_CHECKING:
    from ..llm import ChatTemplate, Tokenizer

_SECONDS = click.FloatRange(min=1)


@command("serve")
@language_model_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listen at this address; 0.0.0.0 is every one of the machine.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Listen at this port; 0 is a free one.",
)
@click.option("--name", help="Call the model this in answers and in requests; by default as its file.")
@click.option(
    "--api-key",
    envvar="RELAX_HETERO_API_KEY",
    help="Answer only requests that have this key, as Authorization: Bearer or x-api-key. "
    "RELAX_HETERO_API_KEY in the environment does the same, and other users of the machine do not see it.",
)
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Let scripts of web pages of this origin, such as https://chat.example, read answers; '*' is every origin. "
    "Repeatable.",
)
@click.option(
    "--max-prompt-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Refuse prompts of more tokens; by default only those that exceed the context.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Refuse requests for longer texts; by default a text may fill the context.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Work on this many requests at a time, and answer more with status 429.",
)
@click.option(
    "--max-choices",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Refuse requests for more texts than this, which are prompts times n.",
)
@click.option("--max-body", type=BytesParam(), default="4M", show_default=True, help="Refuse larger requests.")
@click.option("--timeout", type=_SECONDS, default=600, show_default=True, help="End a request that takes more seconds.")
@click.option(
    "--header-timeout",
    type=_SECONDS,
    default=10,
    show_default=True,
    help="Close a connection if the headers of a request take more seconds to come.",
)
@click.option(
    "--body-timeout",
    type=_SECONDS,
    default=30,
    show_default=True,
    help="Refuse a request whose body takes more seconds to come.",
)
@click.option(
    "--idle-timeout",
    type=_SECONDS,
    default=30,
    show_default=True,
    help="Close a connection that is silent for more seconds after an answer.",
)
@click.option(
    "--read-timeout",
    type=_SECONDS,
    default=30,
    show_default=True,
    help="Close a connection whose client leaves an answer unread for more seconds.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    help="Keep this many connections open; a new one takes the place of one that waits for a request. "
    "The default is four times --max-in-flight, at least 1,024.",
)
@click.option(
    "--max-address-connections",
    type=click.IntRange(min=1),
    help="Keep this many connections open from one address, or from one IPv6 network of 64 bits. "
    "The default is twice --max-in-flight, at least 256.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Keep this many texts in the cache, for prompts that begin alike.",
)
@click.option("--replicas", type=click.IntRange(min=1), help="Run this many processes with a model each, by Ray Serve.")
def serve_command(
    chosen: Chosen,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    cors_origin: tuple[str, ...],
    max_prompt_tokens: int,
    max_tokens: int,
    max_in_flight: int,
    max_choices: int,
    max_body: int,
    timeout: float,
    header_timeout: float,
    body_timeout: float,
    idle_timeout: float,
    read_timeout: float,
    max_connections: int | None,
    max_address_connections: int | None,
    prefixes: int,
    replicas: int | None,
) -> None:
    """Answer requests to MODEL, a GGUF file or the folder of a compiled model, as the OpenAI endpoints do.

    A request whose fields ask for something that is not supported is refused by the field's name. Clients that are
    silent or slow lose their connection; /health is answered at any time.

    \b
    relax-hetero serve model.gguf
    relax-hetero serve model.gguf --vdevice cuda --host 0.0.0.0 --api-key secret
    """
    _need_packages()
    from ..llm.server.app import Settings
    from ..llm.server.limits import Limits

    limits = Limits(
        prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        in_flight=max_in_flight,
        choices=max_choices,
        body_bytes=max_body,
        seconds=timeout,
        header_seconds=header_timeout,
        body_seconds=body_timeout,
        idle_seconds=idle_timeout,
        read_seconds=read_timeout,
        connections=max_connections or 0,
        address_connections=max_address_connections or 0,
    )
    settings = Settings(name or chosen.path.stem, api_key, limits, cors_origin)
    screen = console(stderr=True)

    def on_ready(url: str) -> None:
        screen.print(f"{settings.name}: {url}/v1 (health: {url}/health, metrics: {url}/metrics)", markup=False)

    if replicas is not None:
        if port == 0:
            raise click.UsageError("--replicas needs a --port other than 0")
        from ..llm.server.replicas import run_replicas

        run_replicas(_Loader(chosen, max_in_flight, prefixes), settings, replicas, host, port, on_ready)
        return
    from ..llm.server.run import serve

    made = _Loader(chosen, max_in_flight, prefixes)()
    with made["engine"] as engine:
        serve(engine, settings, made["template"], host, port, on_ready)


class _Loader:
    """Makes an engine, here or in a replica; plain data, so that it goes from process to process."""

    def __init__(self, chosen: Chosen, waiting: int, prefixes: int) -> None:
        self._chosen, self._waiting, self._prefixes = chosen, waiting, prefixes

    def __call__(self) -> Mapping[str, Any]:
        from ..llm import Engine

        model, tokenizer = self._chosen.load()
        template = _template(self._chosen, tokenizer)
        # Each request that is taken may wait, with all its texts.
        most = 16 * self._waiting
        engine = Engine(model, tokenizer, most_waiting=most, prefixes=self._prefixes)
        return {"engine": engine, "template": template}


def _template(chosen: Chosen, tokenizer: Tokenizer) -> ChatTemplate:
    """Of conversations; a model without one completes texts."""
    template = chosen.chat_template(tokenizer)
    if template.fault is not None:
        text = f"No chat template, completions only: {template.fault}"
        console(stderr=True).print(text, markup=False, soft_wrap=True)
    return template


def _need_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HeteroError(f"serve needs the package {error.name}; pip install 'relax-hetero[llm,serve]'") from error
