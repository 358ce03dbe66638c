"""Files for the programs beside this one: MiniLM on one device and on two, and tokens of sentences.

python examples/cpp/export.py build/cpp
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import relax_hetero as rh

APP = Path(__file__).resolve().parents[2] / "apps" / "sentence_similarity"
sys.path.insert(0, str(APP))

from minilm import SentenceTokenizer, default_cache, onnx_path  # noqa: E402 (found beside the app)
from run import PLACEMENT, QUERY, SENTENCES, baseline  # noqa: E402


def write_tokens(path: Path, tokens: dict[str, np.ndarray]) -> None:
    """Write a file of tokens that `similarity.cpp` reads."""
    rows = [np.array(tokens["input_ids"].shape), tokens["input_ids"], tokens["attention_mask"]]
    np.concatenate([row.reshape(-1).astype("int64") for row in rows]).tofile(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``similarity.so``, ``similarity_two.so`` and ``tokens.bin`` into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the model's weights")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    model = str(onnx_path(options.cache, "batch", "seq"))
    for name, vdevices, placement in (
        ("similarity", ["llvm"], None),
        ("similarity_two", ["llvm", baseline()], PLACEMENT),
    ):
        executable = rh.compile(rh.from_onnx(model, vdevices=vdevices, placement=placement))
        executable.export_library(options.folder / f"{name}.so")
    tokens = SentenceTokenizer(options.cache, seq=128, to_longest=True)([QUERY, *SENTENCES])
    write_tokens(options.folder / "tokens.bin", tokens)


if __name__ == "__main__":
    main()
