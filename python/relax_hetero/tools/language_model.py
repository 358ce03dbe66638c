"""Options of commands that run a language model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from ..display.console import console
from ..errors import HeteroError
from .command import INPUT, INPUT_FILE
from .loading_parts import LoadingParts
from .placement_options import PairParam, VDeviceParam, check_unique, memory_limit_option, vdevice_option

if TYPE_CHECKING:
    from ..llm import ChatTemplate, CompiledModel, JsonTokenizer, Tokenizer

F = TypeVar("F", bound=Callable[..., Any])

AUTO: Literal["auto"] = "auto"
_MAX_TEMPLATE_BYTES = 1 << 20
_LARGE_BATCHES = (16, 32)
"""Batch sizes of decode functions for as many slots: a step of 16 takes 0.8 of the time of two of 8."""


class PlacementParam(PairParam):
    """``PATTERN=DEVICE``, or ``auto``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the pattern and the device, or `AUTO`."""
        return value if value == AUTO else super().convert(value, param, ctx)


@dataclass(frozen=True)
class LanguageModelOptions:
    """Model and options of the command line."""

    path: Path  # GGUF file, or folder
    template: Path | None  # file with a chat template; None for the model's own
    # As for `relax_hetero.llm.load`; None or False for its defaults.
    vdevices: list[Any] | None
    placement: Literal["auto"] | dict[str, str] | None
    context: int | None
    slots: int | None
    batch_invariant: bool
    memory_limit: dict[str, str] | None
    expert_counts: Path | None
    verify_drafts: bool
    draft: Path | None
    draft_vdevices: list[Any] | None
    draft_placement: Literal["auto"] | dict[str, str] | None
    # Maximum texts of a decode call, also beyond 32: those of further ones follow through the stages of a model.
    max_batch: int | None = None

    @property
    def name(self) -> str:
        """Name of the model: its file's without the ending, or its folder's."""
        return self.path.resolve().name if self.path.is_dir() else self.path.stem

    def load(self, count_experts: bool = False) -> tuple[CompiledModel, Tokenizer | JsonTokenizer]:
        """Load the model and its tokenizer, and show the parts of loading on stderr.

        `count_experts`: as for `relax_hetero.llm.load`. Raises HeteroError if the file cannot be read, placed or
        compiled, or a package is not installed.
        """
        import relax_hetero.llm as llm

        from ..llm.model_loader import BATCHES

        batches = (*BATCHES, *(rows for rows in _LARGE_BATCHES if rows <= (self.slots or 0)))
        if self.max_batch is not None:
            batches = (*(1 << power for power in range((self.max_batch - 1).bit_length())), self.max_batch)
        others = ("path", "template", "max_batch")
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}
        options |= {"batches": None if batches == BATCHES else batches, "count_experts": count_experts}
        arguments = {name: value for name, value in options.items() if value is not None and value is not False}
        with console(stderr=True).status(f"Loading {self.path.name}") as status:
            parts = LoadingParts(self.path.name, status)
            loaded = llm.load(self.path, progress=parts, **arguments)
            parts.end()
        return loaded

    def chat_template(self, tokenizer: Tokenizer | JsonTokenizer) -> ChatTemplate:
        """Make the chat template; a guessed one is reported on stderr, an invalid one of the model has a `fault`.

        Raises HeteroError if `template` cannot be read, or is not a template.
        """
        from ..artifact.regular_files import read_regular
        from ..llm import ChatTemplate

        if self.template is None:
            chat_template = ChatTemplate.find(tokenizer)
            if chat_template.guessed_from is not None:
                text = f"The chat template is guessed from the token {chat_template.guessed_from}, since the file has "
                text += "none; --chat-template FILE gives another."
                console(stderr=True).print(text, markup=False, soft_wrap=True)
            return chat_template
        try:
            source = read_regular(self.template, _MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise HeteroError(f"{self.template}: is not UTF-8 text: {error}") from error
        return ChatTemplate.from_tokenizer(tokenizer, source)


def _set_threads(ctx: click.Context, param: click.Parameter, threads: int | None) -> None:
    """Set the threads of this process, and of replicas; the model is compiled for as many."""
    if threads is not None:
        os.environ["TVM_NUM_THREADS"] = str(threads)


_OPTIONS = (
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        is_eager=True,
        expose_value=False,
        callback=_set_threads,
        help="Number of threads of CPU kernels; the default is the cores that this process may use.",
    ),
    click.option(
        "--chat-template",
        "template",
        type=INPUT_FILE,
        metavar="FILE",
        help="Use the chat template in this file instead of the model's own.",
    ),
    click.option(
        "--slots", type=click.IntRange(min=1), help="Maximum number of sequences that run at once; the default is 8."
    ),
    click.option(
        "--context",
        type=click.IntRange(min=2),
        metavar="TOKENS",
        help="Maximum number of tokens of a conversation, including its answers. The default is 4,096, "
        "or as many as the model was trained for if these are fewer.",
    ),
    click.option(
        "--batch-invariant",
        is_flag=True,
        help="Compute the same bits for a text whatever else is in its batch, on GPUs as on CPUs; each step then takes "
        "as long as one of the largest batch.",
    ),
    click.option(
        "--draft",
        "--model-draft",
        type=INPUT,
        metavar="MODEL",
        help="GGUF file or folder of a smaller model with the same tokens, which drafts texts that MODEL verifies.",
    ),
    click.option(
        "--draft-vdevice",
        "draft_vdevices",
        multiple=True,
        type=VDeviceParam(),
        metavar="DEVICE",
        help="Run the draft model on this device, as --vdevice; the default is the first --vdevice. Repeatable.",
    ),
    click.option(
        "--draft-placement",
        multiple=True,
        type=PlacementParam("pattern=device", "'blk.[0-8].*=cuda'"),
        metavar="PATTERN=DEVICE",
        help="Put parts of the draft model on a device, as --placement. Repeatable.",
    ),
    click.option(
        "--verify-drafts",
        is_flag=True,
        help="Let texts that repeat themselves take fewer steps on GPUs, too: one more function to compile. "
        "--draft implies it.",
    ),
    click.option(
        "--expert-counts",
        type=INPUT_FILE,
        metavar="FILE",
        help="Let --placement auto keep those experts on the fastest device that are the most frequent ones in this "
        "file, which serve --count-experts wrote.",
    ),
    memory_limit_option("--placement auto", "cuda=24GiB"),
    click.option(
        "--placement",
        multiple=True,
        type=PlacementParam("pattern=device", "'blk.[0-8].*=cuda'"),
        metavar="PATTERN=DEVICE",
        help="Put the parts of the model whose names match a glob pattern on a device; the first that matches decides. "
        "Repeatable; the word auto lets the cost model decide.",
    ),
    vdevice_option,
)


def language_model_options(function: F) -> F:
    """Add MODEL, ``--vdevice``, ``--placement`` and others to a command, which gets one `LanguageModelOptions`."""

    @functools.wraps(function)
    def collect(model: Path, **options: Any) -> None:
        given = {each.name: options.pop(each.name) for each in fields(LanguageModelOptions) if each.name in options}
        check_unique("--memory-limit", [device for device, _ in given["memory_limit"]])
        rules, limits = _parse_placement(given["placement"]), dict(given["memory_limit"]) or None
        if given["draft"] is None and (given["draft_vdevices"] or given["draft_placement"]):
            raise click.UsageError("--draft-vdevice and --draft-placement are for the model of --draft")
        if limits and isinstance(rules, dict):
            raise click.UsageError("--memory-limit bounds --placement auto: it excludes rules")
        rules = AUTO if limits else rules
        if given["expert_counts"] is not None and rules != AUTO:
            raise click.UsageError("--expert-counts is for --placement auto, or --memory-limit, which implies it")
        given |= {
            "vdevices": list(given["vdevices"]) or None,
            "placement": rules,
            "memory_limit": limits,
            "draft_vdevices": list(given["draft_vdevices"]) or None,
            "draft_placement": _parse_placement(given["draft_placement"], "--draft-placement"),
        }
        function(model_options=LanguageModelOptions(path=model, **given), **options)

    for option in _OPTIONS:
        option(collect)
    argument = click.argument("model", type=INPUT)
    return argument(collect)  # type: ignore[return-value]


def _parse_placement(values: tuple[Any, ...], option: str = "--placement") -> Literal["auto"] | dict[str, str] | None:
    if AUTO in values:
        if len(values) > 1:
            raise click.UsageError(f"{option} auto and rules of {option} exclude each other")
        return AUTO
    check_unique(option, [pattern for pattern, _ in values])
    return dict(values) or None
