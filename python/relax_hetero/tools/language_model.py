"""Options of commands that run a language model."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from ..display.console import console
from ..errors import HeteroError
from .command import INPUT, INPUT_FILE
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


if TYPE_CHECKING:
    from rich.status import Status

FILE, PACKING, PASSES, KERNELS, LINKING = "file", "packing", "passes", "kernels", "linking"
CUDA_KERNELS = "CUDA kernels"
_MEANINGS = {
    FILE: "reading the file",
    PACKING: "packing weights",
    PASSES: "lowering the model",
    KERNELS: "compiling kernels",
    CUDA_KERNELS: "compiling CUDA kernels",
    LINKING: "linking",
}
_PACKING_PASSES = {"FormQuantizedMatmuls", "HoistEncodings"}  # passes that lay weights out anew


class LoadingParts:
    """Progress of loading, to be called as `relax_hetero.compile` calls its `progress`.

    On a terminal the spinner's line changes; elsewhere, such as in a log, each part writes a line when it begins.
    `name`: name of the model; `status`: spinner on stderr; `seconds`: seconds of each part so far.
    """

    def __init__(self, name: str, status: Status) -> None:
        self._name, self._status = name, status
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self._shown: set[str] = set()
        self._show(FILE, "")

    @cached_property
    def _passes(self) -> list[str]:
        """The part of each pass; models that are compiled already need none, and no compiler."""
        from ..transform.pipeline import pipeline_steps

        return [PACKING if step.name in _PACKING_PASSES else PASSES for step in pipeline_steps()]

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note that `done` of `total` passes or kernels are done."""
        if stage == PASSES:
            finished = self._passes[done - 1] if self.seconds and done <= len(self._passes) else FILE
            next_part = self._passes[done] if done < min(total, len(self._passes)) else KERNELS
        else:
            finished, next_part = stage, stage if done < total else LINKING
        self._finish(finished)
        self._show(next_part, f", {done} of {total} {stage}")

    def end(self) -> None:
        """Print how long all parts took."""
        self._finish(LINKING if self.seconds else FILE)
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        self._print(f"Loaded {self._name} in {sum(self.seconds.values()):.1f} s: {parts}")

    def _finish(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._begin
        self._begin = now

    def _show(self, part: str, counts: str) -> None:
        text = f"{self._name}: {_MEANINGS[part]}"
        if self._status.console.is_terminal:
            self._status.update(text + counts)
        elif part not in self._shown:
            self._print(text)
        self._shown.add(part)

    def _print(self, text: str) -> None:
        self._status.console.print(text, markup=False, soft_wrap=True)
