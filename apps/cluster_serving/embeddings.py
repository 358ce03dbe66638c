"""Sentence embeddings by all-MiniLM-L6-v2; no other file of the application depends on the model."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engine import RefusedError
from minilm import SentenceTokenizer, default_cache, onnx_path

import relax_hetero as rh

KNOWN = ("That is a happy person", "That is a very happy person")
KNOWN_SIMILARITY = 0.943  # the model's card says so
ENCODINGS = ("float", "base64")


class Sentences:
    """The model in a replica.

    Parameters
    ----------
    tokenizer : SentenceTokenizer
    program : object
        Its ``["main"](ids, mask)`` returns embeddings: a `rh.vm.VirtualMachine`, or a model cut over several hosts.
    """

    def __init__(self, tokenizer: SentenceTokenizer, program: Any) -> None:
        self._tokenizer = tokenizer
        self._program = program

    def run(self, items: Sequence[str]) -> np.ndarray:
        """Embeddings, float32 ``[len(items), 384]``."""
        tokens = self._tokenizer(items)
        return np.asarray(self._program["main"](tokens["input_ids"], tokens["attention_mask"]))

    def check(self) -> None:
        """Compare the similarity of two sentences with the published one."""
        first, second = self.run(KNOWN)
        if not abs(float(first @ second) - KNOWN_SIMILARITY) < 1e-3:
            raise RuntimeError(f"found similarity {first @ second:.4f} of two sentences, expected {KNOWN_SIMILARITY}")


@dataclass(frozen=True)
class Embedder:
    """An engine whose items are sentences, and whose results are rows of 384 numbers of unit length.

    One executable serves batches and sentences of all sizes. It is found in the compile cache: the process that starts
    the application compiles it (`compile`), replicas map its code and weights, and the page cache holds them once for
    all replicas of a host. Where the cache does not help, as on a host with another CPU or without a C
    compiler, a replica compiles for itself.

    Attributes
    ----------
    cache : Path
        Folder of weights, tokenizer and executables.
    most_items : int
        Maximum number of sentences of a request.
    batch_items : int
        Sentences of a batch: on a CPU, a sentence takes as long in a batch of 16 as in one of 32.
    characters : int
        Maximum length of a sentence.
    tokens : int
        Maximum number of tokens read of a sentence; the published model ignores the others, too.
    program : callable, optional
        Called in a replica; returns an object that computes instead of a `rh.vm.VirtualMachine` of the whole model,
        such as a `rh.cluster.Cluster`.
    """

    cache: Path = field(default_factory=default_cache)
    most_items: int = 64
    batch_items: int = 16
    characters: int = 4096
    tokens: int = 256
    program: Callable[[], Any] | None = None
    path: str = "/embed"

    def compile(self) -> Any:
        """The executable, compiled unless the cache has it; weights are downloaded once."""
        module = rh.from_onnx(str(onnx_path(self.cache, "batch", "sequence")), vdevices=["llvm"])
        return rh.compile(module, cache=self.cache / "executables")

    def load(self) -> Sentences:
        """The model, after its first check."""
        program = self.program() if self.program is not None else rh.vm.VirtualMachine(self.compile())
        # Sentences are padded to the longest of a call instead of to the limit: the executable takes any size.
        model = Sentences(SentenceTokenizer(self.cache, self.tokens, to_longest=True), program)
        model.check()
        return model

    def read(self, request: Mapping[str, Any]) -> list[str]:
        """The sentences of ``{"sentences": [...], "encoding": "float" | "base64"}``."""
        unknown = sorted(set(request) - {"sentences", "encoding"})
        if unknown:
            raise RefusedError(400, f"found fields {', '.join(unknown)}, expected sentences and encoding")
        if request.get("encoding", "float") not in ENCODINGS:
            raise RefusedError(400, f"found encoding {request['encoding']!r}, expected one of {', '.join(ENCODINGS)}")
        sentences = request.get("sentences")
        if not isinstance(sentences, list) or not sentences:
            kind = type(sentences).__name__ if sentences else "none"
            raise RefusedError(400, f"found {kind} as sentences, expected a list of 1 to {self.most_items} texts")
        if len(sentences) > self.most_items:
            raise RefusedError(413, f"found {len(sentences)} sentences, expected at most {self.most_items}")
        for index, sentence in enumerate(sentences):
            self._check_sentence(index, sentence)
        return sentences

    def write(self, request: Mapping[str, Any], results: Sequence[np.ndarray]) -> bytes:
        """``{"embeddings": [...]}``: lists of numbers, or float32 (little endian) in base64."""
        rows = np.asarray(results, "<f4")
        if request.get("encoding") == "base64":
            return json.dumps({"embeddings": [base64.b64encode(row.tobytes()).decode() for row in rows]}).encode()
        return json.dumps({"embeddings": rows.tolist()}, separators=(",", ":")).encode()

    def _check_sentence(self, index: int, sentence: object) -> None:
        if not isinstance(sentence, str):
            raise RefusedError(400, f"found {type(sentence).__name__} as sentence {index}, expected a text")
        if len(sentence) > self.characters:
            raise RefusedError(
                413, f"found {len(sentence)} characters in sentence {index}, expected at most {self.characters}"
            )
