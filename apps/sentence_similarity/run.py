"""Rank sentences by meaning with all-MiniLM-L6-v2, the model cut in the middle over two devices.

python apps/sentence_similarity/run.py
python apps/sentence_similarity/run.py --vdevice llvm --vdevice cuda --query "my screen stays black"
python apps/sentence_similarity/run.py --precision int8
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from minilm import SentenceTokenizer, default_cache, onnx_path
from rich.console import Console
from rich.progress import track
from rich.table import Table

import relax_hetero as rh

QUERY = "How can I get a new password?"
SENTENCES = (
    "To reset your login, open the settings and choose 'forgot my passphrase'.",
    "Our office is closed on public holidays.",
    "You can change your credentials on the account page.",
    "The cat sleeps on the warm windowsill.",
    "Two-factor authentication protects your account.",
    "A cheesecake needs an hour in the oven.",
    "Which key opens the front door?",
    "The train to Vienna leaves at noon.",
)
HALVES = ("bfloat16", "float16")
# The last three of six layers, and what follows them, on the second device; the rest on the first.
PLACEMENT = {
    "/encoder/layer.[345]/*": "vdevice:1",
    "/pooling/*": "vdevice:1",
    "/normalize/*": "vdevice:1",
}


def baseline() -> dict[str, str]:
    """A target for any CPU of this architecture, next to the native one: other code for the same model."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"kind": "llvm", "mcpu": "x86-64-v2" if x86 else "generic"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    options = _parse(arguments)
    if options.smoke:
        options.sentences, options.batch, options.seq = options.sentences[:1], 1, 8
    screen = Console(highlight=False)
    path = _prepare(options, screen)

    start = time.perf_counter()
    with screen.status("Importing and compiling"):
        module = rh.from_onnx(str(_source(path, options)), vdevices=options.vdevice, placement=options.place)
        if options.precision in HALVES:
            module = rh.transform.ToMixedPrecision(options.precision)(module)
        executable = rh.compile(module)
        machine = rh.vm.VirtualMachine(executable)
    screen.print(f"Compiled for {len(executable.devices)} devices in {time.perf_counter() - start:.1f} s")
    executable.explain()

    tokenizer = SentenceTokenizer(options.cache, options.seq)
    sentences = [options.query, *options.sentences]
    batches = [tokenizer(sentences[i : i + options.batch]) for i in range(0, len(sentences), options.batch)]
    start = time.perf_counter()
    results = [
        machine["main"](**_filled(batch, options.batch)).numpy()
        for batch in track(batches, "Embedding", console=screen, transient=True)
    ]
    embeddings = np.concatenate(results)[: len(sentences)]
    screen.print(f"Embedded {len(sentences)} sentences in {time.perf_counter() - start:.2f} s\n")
    screen.print(ranking_table(options.query, options.sentences, embeddings[1:] @ embeddings[0]))
    return _check(path, batches, options, embeddings, screen)


def ranking_table(query: str, sentences: Sequence[str], scores: np.ndarray) -> Table:
    """The sentences, nearest in meaning first."""
    table = Table(title=f"Nearest to: {query}", title_justify="left")
    table.add_column("cosine", justify="right")
    table.add_column("")
    table.add_column("sentence")
    for index in np.argsort(-scores, kind="stable"):
        bar = "█" * max(0, round(20 * float(scores[index])))
        table.add_row(f"{scores[index]:.3f}", bar, sentences[index])
    return table


def _prepare(options: argparse.Namespace, screen: Console) -> Path:
    with screen.status("Fetching the model (85 MB, once) and writing its ONNX file"):
        path = onnx_path(options.cache, options.batch, options.seq)
    screen.print(f"Model: {path.name}, input_ids and attention_mask [{options.batch}, {options.seq}]")
    return path


def _source(path: Path, options: argparse.Namespace) -> Path:
    """The file to import: the float one, or the same quantized by ONNX Runtime's quantizer."""
    if options.precision != "int8":
        return path
    try:
        from quantize import quantized_minilm
    except ImportError as error:
        raise SystemExit(f"error: --precision int8 needs onnxruntime, which quantizes the model: {error}") from error
    return quantized_minilm(options.cache, options.batch, options.seq)


def _filled(batch: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The batch with its last row repeated up to the compiled size."""
    return {name: np.concatenate([rows] + [rows[-1:]] * (size - len(rows))) for name, rows in batch.items()}


def _check(
    path: Path,
    batches: Sequence[dict[str, np.ndarray]],
    options: argparse.Namespace,
    embeddings: np.ndarray,
    screen: Console,
) -> int:
    """Compare with ONNX Runtime in float32 where it is installed: numbers, or the order in lower precision."""
    try:
        import onnxruntime
    except ImportError:
        screen.print("(ONNX Runtime is not installed, so there is nothing to compare with.)")
        return 0
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = np.concatenate([session.run(None, _filled(batch, options.batch))[0] for batch in batches])[
        : len(embeddings)
    ]
    difference = float(np.abs(embeddings - expected).max())
    if options.precision == "float32":
        compared, same = "", np.allclose(embeddings, expected, rtol=1e-3, atol=1e-4)
    else:
        compared, same = " order", np.array_equal(_order(embeddings), _order(expected))
    if not same:
        screen.print(f"[red]Not the same{compared} as ONNX Runtime: largest difference {difference:.2e}[/red]")
        return 1
    screen.print(f"Same{compared} as ONNX Runtime: largest difference {difference:.1e}")
    return 0


def _order(embeddings: np.ndarray) -> np.ndarray:
    """The sentences after the first, nearest to it first."""
    return np.argsort(-(embeddings[1:] @ embeddings[0]), kind="stable")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--query", default=QUERY, help="the sentence to compare the others with")
    parser.add_argument("--sentences", type=Path, help="a text file with one sentence a line")
    parser.add_argument("--vdevice", action="append", type=_vdevice, help="a device; repeat it (default: two CPUs)")
    parser.add_argument("--place", action="append", type=_place, metavar="PATTERN=DEVICE", help="a placement rule")
    precisions = ("float32", *HALVES, "int8")
    parser.add_argument("--precision", choices=precisions, default="float32", help="precision of products")
    parser.add_argument("--batch", type=int, default=4, help="sentences per call (default 4)")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sentence (default 32, at most 512)")
    parser.add_argument("--smoke", action="store_true", help="few tokens of one sentence: does the command work?")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the model's files")
    options = parser.parse_args(arguments)
    options.vdevice = options.vdevice or ["llvm", baseline()]
    # The built-in cut needs a second device to put the upper half on.
    options.place = dict(options.place or ()) or (PLACEMENT if len(options.vdevice) > 1 else None)
    lines = options.sentences.read_text("utf-8").splitlines() if options.sentences else SENTENCES
    options.sentences = [line for line in lines if line.strip()]
    return options


def _vdevice(text: str) -> str | dict[str, Any]:
    return json.loads(text) if text.startswith("{") else text


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
