"""Folders of Hugging Face: configuration and weights as those of a GGUF file."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from ...errors import FrontendError
from ..gguf.file import FileTensor, GgufFile
from .config import CONFIG, HubConfig, metadata_of
from .lazy import file_tensor
from .quantized import Quantization
from .stored_tensors import read_json, read_tensors
from .tensors import hub_tensors, layer_numbers

_log = logging.getLogger("relax_hetero")


def read_folder(path: str | os.PathLike[str]) -> GgufFile:
    """Open a folder with ``config.json`` and ``*.safetensors`` as a GGUF file.

    Tensors are views of the mapped files, or made of them when they are read. Raises FrontendError if a file is missing
    or damaged, or the model's class, a tensor or a quantization is unknown.
    """
    folder = Path(path)
    config = HubConfig(folder / CONFIG)
    quantization = Quantization(config)
    fields = metadata_of(config)
    stored, mapped = read_tensors(folder)
    tensors = hub_tensors(stored, config, quantization)
    fields |= layer_numbers(stored, config)
    for module in sorted(folder.glob("[0-9]*_*")):
        if module.name.endswith("_Pooling"):
            fields[f"{config.hub_class.architecture}.pooling_type"] = _read_pooling(module / CONFIG)
        if module.name.endswith("_Dense"):
            name = f"dense_{module.name.partition('_')[0]}.weight"
            tensors[name], files = _read_dense(module, name)
            mapped += files
    for dtype in sorted(quantization.dequantized):
        method = quantization.values.get("quant_method", "quantized weights")
        _log.warning("%s: weights of %s become %s, since no kernel reads their bits", folder, method, dtype)
    fields |= {"general.architecture": config.hub_class.architecture, "general.name": _name_of(folder)}
    return GgufFile(folder, fields, tensors, mapped)


_POOLINGS = ("pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken")
"""Kinds of pooling of sentence-transformers, in the order of ``pooling_type`` in GGUF files, which counts from 1."""


def _read_pooling(path: Path) -> int:
    """Number of the pooling of a module of sentence-transformers."""
    chosen = [name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise FrontendError(
            f"{path}: found {' and '.join(chosen) or 'no pooling'}, expected one of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS.index(chosen[0]) + 1


def _read_dense(module: Path, name: str) -> tuple[FileTensor, tuple[mmap.mmap, ...]]:
    """Matrix of a module of sentence-transformers by which embeddings are multiplied, and its mapped files."""
    values = read_json(module / CONFIG)
    stored, mapped = read_tensors(module)
    is_identity = str(values.get("activation_function")).endswith("Identity")
    if stored.keys() != {"linear.weight"} or not is_identity:
        names = ", ".join(stored)
        raise FrontendError(
            f"{module}: found {names} and the activation {values.get('activation_function')!r:.100}, expected "
            "linear.weight and the identity"
        )
    return file_tensor(stored["linear.weight"]).renamed(name), mapped


def _name_of(folder: Path) -> str:
    """Name of a model: its folder's, or its repository's if that is a snapshot in the cache of huggingface_hub."""
    resolved = folder.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return resolved.name
