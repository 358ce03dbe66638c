"""Access to the sentence similarity example, which has MiniLM's weights and tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path


def use_sentence_example() -> None:
    """Make the modules of ``apps/sentence_similarity`` importable."""
    folder = str(Path(__file__).resolve().parents[2] / "sentence_similarity")
    if folder not in sys.path:
        sys.path.insert(0, folder)
