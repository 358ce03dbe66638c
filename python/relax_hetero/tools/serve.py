"""``relax-hetero serve``: OpenAI's endpoints for a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..display.console import console
from ..errors import EncoderError, HeteroError, pip_install
from ..llm.server.limits import Limits
from .command import INPUT, OUTPUT_FILE, command
from .language_model import AUTO, LanguageModelOptions, language_model_options
from .models import has_weights
from .placement_options import BytesParam

if TYPE_CHECKING:
    from ..llm import ChatTemplate, JsonTokenizer, Tokenizer


class _ReplicasParam(click.ParamType):
    """A number of replicas, or ``auto``."""

    name = "replicas"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        """Return the number, or `AUTO`."""
        if value == AUTO or isinstance(value, int) or value.lstrip("-").isdecimal():
            return AUTO if value == AUTO else click.IntRange(min=1).convert(value, param, ctx)
        self.fail(f"{value!r} is not a number of replicas, or {AUTO}", param, ctx)


_SECONDS = click.FloatRange(min=1)
_LANGUAGE_MODEL_OPTIONS = {
    "context": "--context",
    "slots": "--slots",
    "template": "--chat-template",
    "batch_invariant": "--batch-invariant",
    "memory_limit": "--memory-limit",
    "expert_counts": "--expert-counts",
    "draft": "--draft",
    "verify_drafts": "--verify-drafts",
}
"""Options that do not apply to encoders, by their fields in `LanguageModelOptions`."""
_Command = Callable[..., Any]


def _limit(option: str, field: str, kind: click.ParamType, text: str) -> Callable[[_Command], _Command]:
    """Declare an option that sets a field of `Limits`; a default of 0 is not shown."""
    value: float = getattr(Limits, field)
    default = f"{int(value) >> 20}M" if isinstance(kind, BytesParam) else f"{value:g}"
    return click.option(option, field, type=kind, default=default if value else None, help=text)


@command("serve")
@language_model_options
@click.option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 means every address of the machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen at; 0 means a free one.")
@click.option("--name", help="Name of the model in requests and answers; the default is the name of its file.")
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
@_limit(
    "--max-prompt-tokens",
    "prompt_tokens",
    click.IntRange(min=0),
    "Refuse prompts of more tokens; by default only those that exceed the context.",
)
@_limit(
    "--max-tokens",
    "max_tokens",
    click.IntRange(min=0),
    "Refuse requests for longer texts; by default a text may fill the context.",
)
@_limit(
    "--max-in-flight",
    "in_flight",
    click.IntRange(min=1),
    "Work on this many requests at a time, and answer more with status 429.",
)
@_limit(
    "--max-choices",
    "choices",
    click.IntRange(min=1),
    "Refuse requests for more texts than this, which are prompts times n.",
)
@_limit("--max-body", "body_bytes", BytesParam(), "Refuse larger requests.")
@_limit("--timeout", "seconds", _SECONDS, "End a request that takes more seconds.")
@_limit(
    "--header-timeout",
    "header_seconds",
    _SECONDS,
    "Close a connection if the headers of a request take more seconds to come.",
)
@_limit("--body-timeout", "body_seconds", _SECONDS, "Refuse a request whose body takes more seconds to come.")
@_limit(
    "--idle-timeout", "idle_seconds", _SECONDS, "Close a connection that is silent for more seconds after an answer."
)
@_limit(
    "--read-timeout",
    "read_seconds",
    _SECONDS,
    "Close a connection whose client leaves an answer unread for more seconds.",
)
@_limit(
    "--max-connections",
    "connections",
    click.IntRange(min=1),
    "Keep this many connections open; a new one takes the place of one that waits for a request. "
    "The default is four times --max-in-flight, at least 1,024.",
)
@_limit(
    "--max-address-connections",
    "address_connections",
    click.IntRange(min=1),
    "Keep this many connections open from one address, or from one IPv6 network of 64 bits. "
    "The default is twice --max-in-flight, at least 256.",
)
@click.option(
    "--prefixes",
    type=click.IntRange(min=0),
    default=8,
    help="Number of texts to keep in the cache, for prompts with a common prefix.",
)
@click.option(
    "--count-experts",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Count the tokens that choose each expert of a mixture, and write the counts to this file every minute and at "
    "the end, added to those that it has. --expert-counts FILE --placement auto then keeps the most frequent experts "
    "on the fastest device, as rh.llm.load(expert_counts=FILE) does.",
)
@click.option(
    "--tool-format",
    metavar="NAME",
    help="Format in which the model writes calls of tools, such as hermes or mistral; by default it is known from the "
    "chat template.",
)
@click.option(
    "--embedding-model",
    type=INPUT,
    metavar="MODEL",
    help="GGUF file or folder of an encoder, or of a language model, for /v1/embeddings.",
)
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="Sampling of requests that state none: as the model's files recommend, or temperature 1 without filters.",
)
@click.option(
    "--replicas",
    type=_ReplicasParam(),
    metavar="N",
    help="Run this many processes with a model each, using Ray Serve; with --vdevice cuda, each on GPUs of its own. "
    "The word auto chooses between replicas, and GPUs that share layers or have some each, for --slots texts of all "
    "replicas together, by default 8 for each GPU.",
)
def serve_command(
    model_options: LanguageModelOptions,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    cors_origin: tuple[str, ...],
    prefixes: int,
    count_experts: Path | None,
    tool_format: str | None,
    embedding_model: Path | None,
    generation_config: str,
    replicas: int | Literal["auto"] | None,
    **limit_values: Any,
) -> None:
    """Serve MODEL, a GGUF file or a folder, with OpenAI's endpoints.

    Folders are of Hugging Face, with an ONNX decoder, or of a compiled model. Encoders have /v1/embeddings only.

    Requests with unsupported fields are refused with the field's name. Connections of silent or slow clients are
    closed; /health is always answered.

    \b
    relax-hetero serve model.gguf
    relax-hetero serve model.gguf --vdevice cuda --host 0.0.0.0 --api-key secret
    """
    _check_packages()
    from ..llm.server.app import Settings

    limits = Limits(**{field: value for field, value in limit_values.items() if value is not None})
    settings = Settings(name or model_options.name, api_key, limits, cors_origin, tool_format)
    stderr = console(stderr=True)

    def on_ready(url: str) -> None:
        stderr.print(f"{settings.name}: {url}/v1 (health: {url}/health, metrics: {url}/metrics)", markup=False)

    if replicas is not None and count_experts is not None:
        raise click.UsageError("--count-experts counts in one process; expected it without --replicas")
    gpus = 0.0
    if replicas == AUTO:
        model_options, replicas, reason = _chosen_replicas(model_options)
        stderr.print(f"{settings.name}: {reason}", markup=False, soft_wrap=True)
        replicas = replicas if replicas > 1 else None
    if replicas is not None:
        gpus = _gpus_of_replica(model_options.vdevices or [], replicas)
    uses_defaults = generation_config == "auto"
    loader = _Loader(model_options, limits.in_flight, prefixes, count_experts, embedding_model, uses_defaults)
    if replicas is not None:
        if port == 0:
            raise click.UsageError("found --port 0 with --replicas; expected the number of a port")
        _check_model(model_options.path)
        from ..llm.server.replicas import run_replicas

        run_replicas(loader, settings, replicas, host, port, on_ready, gpus)
        return
    from ..llm.server.serve import serve

    model = loader()
    try:
        settings = replace(settings, sampling_defaults=model["sampling_defaults"])
        with model["engine"] or nullcontext() as engine:
            serve(engine, settings, model["template"], host, port, on_ready, model["encoder"])
    finally:
        if count_experts is not None:
            model["counts"].write()


def _chosen_replicas(options: LanguageModelOptions) -> tuple[LanguageModelOptions, int, str]:
    """Options of each replica on all GPUs of a kind, the number of replicas, and the reason."""
    from ..frontend import CostModel
    from ..frontend.auto.auto_placement import memory_limits
    from ..frontend.gguf.choose_rules import choose_replicas
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.language_model_files import read_language_model
    from ..llm.model_loader import BATCHES, default_cache
    from ..target.backend import backend_of
    from ..target.make_vdevice import parse_vdevices

    kind = _gpu_kind(options.vdevices or [])
    if kind is None:
        raise click.UsageError(
            f"--replicas auto chooses among all GPUs of a kind, found --vdevice {options.vdevices or 'llvm'}; expected "
            "--vdevice cuda, or a number of replicas"
        )
    if isinstance(options.placement, dict) or options.expert_counts is not None:
        raise click.UsageError(
            "found placement rules or --expert-counts with --replicas auto, which chooses the placement; leave them "
            "out, or give a number of replicas"
        )
    if not has_weights(options.path):
        raise click.UsageError(f"--replicas auto needs a GGUF file or a folder of Hugging Face, found {options.path}")
    vdevices = parse_vdevices([f"{kind}:{index}" for index in range(_gpu_count(kind, AUTO))])
    targets = sorted({str(vdevice.target) for vdevice in vdevices})
    if len(targets) > 1:
        raise HeteroError(
            f"--replicas auto: found GPUs of different kinds, {' and '.join(targets)}; expected equal ones: make the "
            "others invisible (CUDA_VISIBLE_DEVICES), or give a number of replicas"
        )
    file = read_language_model(options.path)
    model = hyperparameters_of(file)
    if not model.is_causal:
        raise click.UsageError(
            f"--replicas auto is for models that generate texts; {options.path} encodes them: give a number of replicas"
        )
    texts = options.slots or max(BATCHES) * len(vdevices)
    cache = default_cache(model, vdevices, options.context, texts)
    limit = min(memory_limits(options.memory_limit, vdevices).values(), default=None)
    chosen = choose_replicas(file, model, cache, vdevices, CostModel.measured(vdevices), limit, texts)
    together = [vdevices[gpu] for gpu in backend_of(kind).in_order_of_links(chosen.devices)]
    own = replace(
        options,
        vdevices=[kind] * chosen.devices if chosen.replicas > 1 else together[: chosen.devices],
        placement=chosen.rules,
        memory_limit=None,
        slots=chosen.slots,
        max_batch=chosen.batch,
    )
    return own, chosen.replicas, chosen.reason


def _check_model(path: Path) -> None:
    """Raise what each replica would, before Ray starts, if a path is not that of a language model."""
    from ..artifact.file_hints import NO_LANGUAGE_MODEL, folder_kind
    from ..frontend.language_model_files import read_language_model

    if path.is_file() or has_weights(path):
        read_language_model(path)
    elif folder_kind(path) is None:
        raise HeteroError(f"{path}: {NO_LANGUAGE_MODEL}")


def _gpu_kind(vdevices: Sequence[Any]) -> str | None:
    """The kind of GPUs of Ray, without a number, that all devices are; None if there is none."""
    from ..target.backend import backends

    kinds = set(map(str, vdevices))
    counted = {backend.kind for backend in backends() if backend.counted_by_ray}
    return kinds.pop() if len(kinds) == 1 and kinds <= counted else None


def _gpu_count(kind: str, replicas: int | str) -> int:
    """Number of GPUs of a kind; an error if there is none."""
    from ..target.backend import backend_of

    backend = backend_of(kind)
    if not (count := backend.count()):
        reason = backend.why_absent()
        raise HeteroError(f"--replicas {replicas}: found no {kind} device, expected one or more: {reason}")
    return count


def _gpus_of_replica(vdevices: Sequence[Any], replicas: int) -> float:
    """GPUs of each replica: as many as it names without numbers, or a share of one if there are too few."""
    kind, own = _gpu_kind(vdevices), len(vdevices)
    if kind is None:
        return 0
    count = _gpu_count(kind, replicas)
    if own * replicas <= count:
        return float(own)
    if own > 1:  # Ray does not share several at once
        raise click.UsageError(
            f"--replicas {replicas} with {own} devices of {kind} each need {own * replicas}, found {count}; expected "
            f"fewer replicas or devices, or --vdevice {kind} once to share GPUs"
        )
    return 1 / -(-replicas // count)  # the shares of a replica are on one GPU


@dataclass(frozen=True)
class _Loader:
    """Makes an engine and a chat template, in this process or in a replica; can be pickled."""

    model_options: LanguageModelOptions
    in_flight: int
    prefixes: int
    count_experts: Path | None
    embedding_model: Path | None
    uses_defaults: bool

    def __call__(self) -> Mapping[str, Any]:
        from ..llm import Engine

        try:
            model, tokenizer = self.model_options.load(count_experts=self.count_experts is not None)
        except EncoderError:
            return {**self._load_encoder_alone(), "sampling_defaults": {}, "counts": None}
        if self.count_experts is not None:
            model.expert_counts.continue_file(self.count_experts)  # one that cannot be written is an error now
        template = _chat_template(self.model_options, tokenizer)
        # Room for all choices of all requests in flight.
        engine = Engine(model, tokenizer, max_waiting=16 * self.in_flight, prefixes=self.prefixes)
        return {
            "engine": engine,
            "template": template,
            "encoder": self.embedding_model and self._load_encoder(self.embedding_model),
            "counts": self.count_experts and model.expert_counts,
            "sampling_defaults": tokenizer.sampling_defaults if self.uses_defaults else {},
        }

    def _load_encoder_alone(self) -> dict[str, Any]:
        options = self.model_options
        others = [option for name, option in _LANGUAGE_MODEL_OPTIONS.items() if getattr(options, name)]
        others += ["--count-experts"] * bool(self.count_experts) + ["--embedding-model"] * bool(self.embedding_model)
        rules = None if options.placement == AUTO else options.placement
        others += ["--placement auto"] * (options.placement == AUTO)
        if others:
            found = " and ".join(others)
            raise HeteroError(f"{options.path}: found {found}, which does not apply to an encoder, expected none")
        return {"engine": None, "template": None, "encoder": self._load_encoder(options.path, rules)}

    def _load_encoder(self, path: Path, rules: dict[str, str] | None = None) -> Any:
        import relax_hetero.llm as llm

        return llm.Encoder(path, self.model_options.vdevices, rules)


def _chat_template(model_options: LanguageModelOptions, tokenizer: Tokenizer | JsonTokenizer) -> ChatTemplate:
    """Make the chat template; if there is none, report on stderr that only completions work."""
    template = model_options.chat_template(tokenizer)
    if template.fault is not None:
        text = f"No chat template, completions only: {template.fault}"
        console(stderr=True).print(text, markup=False, soft_wrap=True)
    return template


def _check_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HeteroError(f"serve needs the package {error.name}; {pip_install('llm,serve')}") from error
