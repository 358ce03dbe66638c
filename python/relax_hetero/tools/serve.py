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


@command("serve")
@language_model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it listens; 0.0.0.0 for everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for a free one.")
@click.option("--name", help="Of the model, for callers; the file's by default.")
@click.option("--api-key", envvar="RELAX_HETERO_API_KEY", help="That callers must have. Also RELAX_HETERO_API_KEY.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=0), default=0, help="Of one prompt; default: the context.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=0, help="Of one answer; default: the context.")
@click.option("--max-in-flight", type=click.IntRange(min=1), default=128, show_default=True, help="Requests at a time.")
@click.option("--max-choices", type=click.IntRange(min=1), default=16, show_default=True, help="Texts of one request.")
@click.option("--max-body", type=BytesParam(), default="4M", show_default=True, help="Of a request.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600, show_default=True, help="Seconds of a request.")
@click.option("--prefixes", type=click.IntRange(min=0), default=8, show_default=True, help="Texts kept in the cache.")
@click.option("--replicas", type=click.IntRange(min=1), help="Processes with a model each, by Ray Serve.")
def serve_command(
    chosen: Chosen,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    max_prompt_tokens: int,
    max_tokens: int,
    max_in_flight: int,
    max_choices: int,
    max_body: int,
    timeout: float,
    prefixes: int,
    replicas: int | None,
) -> None:
    """Answer requests to MODEL, a GGUF file or the folder of a compiled model, as the OpenAI endpoints do.

    \b
    relax-hetero serve model.gguf
    relax-hetero serve model.gguf --vdevice cuda --host 0.0.0.0 --api-key secret
    """
    _need_packages()
    from ..llm.server.app import Settings
    from ..llm.server.limits import Limits

    limits = Limits(max_prompt_tokens, max_tokens, max_in_flight, max_choices, max_body, timeout)
    settings = Settings(name or chosen.path.stem, api_key, limits)
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
        console(stderr=True).print(f"no conversations, completions only: {template.fault}", markup=False)
    return template


def _need_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HeteroError(f"serve needs the package {error.name}; pip install 'relax-hetero[llm,serve]'") from error
