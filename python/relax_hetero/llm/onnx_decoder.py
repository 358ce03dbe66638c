"""`rh.llm.load_onnx`: from an ONNX decoder, as onnxruntime-genai writes them, to a model that an engine runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BuildError
from ..target.make_vdevice import parse_vdevices
from .compiled_model import CompiledModel
from .description import ModelDescription
from .loaded_model import BATCHES, CHUNKS, CONTEXT, is_batch_invariant

if TYPE_CHECKING:
    from ..frontend.onnx.model import ModelSource
    from ..frontend.onnx.placement_rules import PlacementRules
    from ..target.make_vdevice import VDeviceEntry


def load_onnx(
    source: ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    chunks: Sequence[int] = CHUNKS,
    slots: int | None = None,
    context: int = CONTEXT,
    page_type: str = "float16",
    batch_invariant: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> CompiledModel:
    """A decoder that runs, its ``past_key_values`` in a cache of pages.

    Parameters
    ----------
    source : str, path, bytes or onnx.ModelProto
        A model with nodes of GroupQueryAttention, or the folder of one, whose ``genai_config.json`` names its file.
    vdevices, placement
        As `rh.from_onnx` takes them.
    batches, chunks, slots, context, page_type
        As `rh.PagedCache` takes them.
    batch_invariant : bool
        As for `load`.
    progress : callable, optional
        As for `rh.compile`.

    Returns
    -------
    CompiledModel
        Tokens in, logits out; an `Engine` wants a tokenizer besides, such as ``JsonTokenizer(folder)``.

    Raises
    ------
    HeteroError
        If the model cannot be read, has no such cache, or cannot be placed or compiled.
    """
    from ..driver import compile as compile_module
    from ..frontend import PagedCache
    from ..frontend.from_onnx import from_onnx

    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        source = _file_in(Path(source))
    devices = parse_vdevices(["llvm"] if vdevices is None else vdevices)
    slots = PagedCache(tuple(batches), tuple(chunks), slots, context, page_type).sequences
    if batch_invariant and not all(is_batch_invariant(device.target) for device in devices):
        batches, chunks = (max(batches),), (max(chunks),)
    cache = PagedCache(tuple(batches), tuple(chunks), slots, context, page_type)
    mod = from_onnx(source, devices, placement, cache=cache)
    facts: dict[str, Any] = mod[f"decode_{cache.batches[0]}"].attrs["decoder"]
    kv_heads = sorted({int(heads) for heads in facts["kv_heads"]})
    if len(kv_heads) != 1:
        raise BuildError(f"found layers of {kv_heads} heads of keys and values, expected one number of all layers")
    pages = [f"pages_{layer}" for layer in range(len(facts["windows"]))]
    names = [f"decode_{rows}" for rows in cache.batches] + [f"prefill_{rows}" for rows in cache.chunks]
    executable = compile_module(mod, donate=dict.fromkeys(names, pages), progress=progress)
    logits: Any = next(spec for spec in executable.signature(names[0]).outputs if spec.name == "logits")
    description = ModelDescription(
        name=Path(source).stem if isinstance(source, (str, os.PathLike)) else "model",
        vocabulary=int(logits.shape[-1]),
        context=context,
        slots=cache.sequences,
        kv_heads=kv_heads[0],
        size=int(facts["size"]),
        windows=tuple(int(window) for window in facts["windows"]),
        page_type=page_type,
        decodes_like_prefill=all(is_batch_invariant(device.target) for device in devices),
    )
    return CompiledModel(executable, description)


def _file_in(folder: Path) -> Path:
    """The model in a folder that onnxruntime-genai wrote."""
    config = folder / "genai_config.json"
    if not config.is_file():
        return folder / "model.onnx"
    try:
        return folder / str(json.loads(config.read_text("utf-8"))["model"]["decoder"]["filename"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BuildError(f"{config}: names no file of a decoder: {type(error).__name__}: {error}") from error
