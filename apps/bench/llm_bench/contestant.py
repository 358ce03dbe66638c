"""A process with one model in one library, which executes commands of `compare.py`.

python apps/bench/llm_bench/contestant.py llama.cpp model.gguf --threads 1 --context 1024

It reads commands as lines of JSON, and answers each with a line: its result, and the seconds that it took. While
it waits it computes nothing, so that contestants can take turns. Memory of the imports is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Contestant(Protocol):
    """A model with one sequence."""

    def reset(self) -> None:
        """Forget all tokens."""

    def instructions(self) -> str:
        """The library's list of the instructions that it was compiled for; empty if it has none."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text, with the beginning-of-text token."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        """Append at most 512 tokens to the sequence; logits (vocabulary,) after the last."""


class Ours:
    """relax_hetero on the CPU, loaded from a folder of `rh.llm.save`."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from relax_hetero.llm.model_loader import load

        self._model, self._tokenizer = load(path, background=False)
        if self._model.context < context:
            raise SystemExit(f"{path} was compiled for {self._model.context} positions, and {context} are needed")
        self._slot = self._model.cache.add()

    def instructions(self) -> str:
        return ""

    def reset(self) -> None:
        self._model.cache.truncate(self._slot, 0)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def text_of(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        if len(tokens) == 1:
            return self._model.decode([self._slot], tokens)[0]
        chunk = self._model.chunk
        parts = [tokens[begin : begin + chunk] for begin in range(0, len(tokens), chunk)]
        return [self._model.prefill(self._slot, np.array(part, "int32")) for part in parts][-1]


def _ours(path: str, threads: int, context: int) -> Callable[[], Contestant]:
    import relax_hetero.llm.model_loader  # noqa: F401 - imports are not counted

    return lambda: Ours(path, threads, context)


def _llama_cpp(path: str, threads: int, context: int) -> Callable[[], Contestant]:
    from llama_cpp_model import LlamaCppModel

    return lambda: LlamaCppModel(path, threads, context)


LIBRARIES = {"ours": _ours, "llama.cpp": _llama_cpp}


def memory() -> dict[str, int]:
    """Resident bytes of this process: now, at the peak, and now without pages of files."""
    names = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "anonymous"}
    with open("/proc/self/status") as status:
        lines = (line.split() for line in status)
        return {names[words[0][:-1]]: int(words[1]) << 10 for words in lines if words and words[0][:-1] in names}


class Work:
    """The commands of a contestant, by name."""

    def __init__(self, model: Contestant, imported: dict[str, int]) -> None:
        self._model, self._imported = model, imported
        self._next = 0

    def instructions(self) -> str:
        """The library's list of the instructions that it was compiled for."""
        return self._model.instructions()

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self._model.tokenize(text)

    def text_of(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return self._model.text_of(tokens)

    def prefill(self, tokens: list[int]) -> int:
        """Start a new sequence with some tokens; returns the most probable next one."""
        self._model.reset()
        self._next = int(self._model.append(tokens).argmax())
        return self._next

    def decode(self, count: int) -> list[int]:
        """Continue greedily by `count` tokens; returns them."""
        tokens = []
        for _ in range(count):
            tokens.append(self._next)
            self._next = int(self._model.append([self._next]).argmax())
        return tokens

    def gaps(self, tokens: list[int], start: int) -> list[float]:
        """For each token from `start` on, the difference of the largest logit and its own, given all before it."""
        self._model.reset()
        logits = self._model.append(tokens[:start])
        differences = []
        for token in tokens[start:]:
            differences.append(float(logits.max() - logits[token]))
            logits = self._model.append([token])
        return differences

    def surprise(self, tokens: list[int]) -> float:
        """The mean of -log p over all tokens but the first; each takes a decode step."""
        self._model.reset()
        total = 0.0
        for token, following in zip(tokens, tokens[1:], strict=False):
            logits = self._model.append([token]).astype(np.float64)
            top = logits.max()
            total += top + np.log(np.exp(logits - top).sum()) - logits[following]
        return total / (len(tokens) - 1)

    def memory(self) -> dict[str, int]:
        """Resident bytes above those after the imports."""
        now = memory()
        return {name: now[name] - self._imported["resident" if name == "peak" else name] for name in now}


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("model", help="a GGUF file; for ours a folder of rh.llm.save")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cpu-time", action="store_true", help="measure the process's CPU time")
    options = parser.parse_args()
    os.environ.update(TVM_NUM_THREADS=str(options.threads), OMP_NUM_THREADS=str(options.threads))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    make = LIBRARIES[options.library](options.model, options.threads, options.context)
    imported = memory()
    clock = time.process_time if options.cpu_time else time.perf_counter
    start = time.perf_counter()
    work = Work(make(), imported)
    _answer(answers, None, time.perf_counter() - start)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        method = getattr(work, command.pop("do"))
        start = clock()
        result = method(**command)
        _answer(answers, result, clock() - start)


def _answer(stream: Any, result: object, seconds: float) -> None:
    print(json.dumps({"result": result, "seconds": seconds}), file=stream, flush=True)


if __name__ == "__main__":
    main()
