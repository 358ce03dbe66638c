"""Files of language models: a GGUF file, or a folder of Hugging Face as one."""

from __future__ import annotations

import os

from ..artifact.file_hints import folder_kind
from .gguf.file import GgufFile, read_gguf
from .hub.folder import read_folder


def read_language_model(path: str | os.PathLike[str] | GgufFile) -> GgufFile:
    """Open a GGUF file, or a folder with ``config.json`` and ``*.safetensors``.

    Raises FrontendError if it cannot be read.
    """
    if isinstance(path, GgufFile):
        return path
    return read_folder(path) if folder_kind(path) == "hub" else read_gguf(path)
