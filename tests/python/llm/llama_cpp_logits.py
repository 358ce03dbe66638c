"""Logits of llama.cpp: fresh ones where it is installed, and recorded ones of the small models.

`python tests/python/llm/llama_cpp_logits.py` records them anew.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).with_suffix(".npz")
_PROGRAM = Path(__file__).parents[3] / "apps" / "bench" / "llm_bench" / "llama_cpp_model.py"

TOKENS = np.random.default_rng(0).integers(0, 320, 100).tolist()
"""Tokens of the recorded logits."""


def fresh(path, tokens) -> np.ndarray:
    """Logits after each token, (tokens, vocabulary); in a process of its own, since it crashes on some CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        prompt, logits = Path(folder) / "tokens.npy", Path(folder) / "logits.npy"
        np.save(prompt, tokens)
        words = [sys.executable, str(_PROGRAM), str(path), str(prompt), str(logits), "--exact-cache"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}"
        return np.load(logits)


def recorded(name: str) -> np.ndarray:
    """Logits after the last of `TOKENS` of a model of `gguf_files.MODELS` in float32, seed 0: (vocabulary,)."""
    with np.load(RECORDED) as archive:
        return archive[name]


def _record() -> None:
    from llm.gguf_files import LLAMA_CPP_MODELS, MODELS, write_gguf

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write_gguf(Path(folder) / f"{name}.gguf", MODELS[name]) for name in LLAMA_CPP_MODELS}
        np.savez_compressed(RECORDED, **{name: fresh(path, TOKENS)[-1] for name, path in paths.items()})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _record()
