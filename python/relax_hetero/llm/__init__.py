"""Language models: the engine that shares one among requests, sampling, tokenizers, chat templates and the server.

Names are resolved on first use: the server and tokenizers need packages of their own.
"""

from __future__ import annotations

import importlib
from typing import Any

# Now: imported later, a module of the same name would take the place of the function.
from .load import load, save
from .load_onnx import load_onnx

# Public name -> module.
_EXPORTS = {
    "Cache": ".model",
    "CacheLayer": ".cache",
    "ChatTemplate": ".chat_template",
    "CompiledModel": ".compiled_model",
    "Delta": ".text_stream",
    "Engine": ".engine",
    "EngineClosedError": ".errors",
    "EngineFullError": ".errors",
    "JsonTokenizer": ".json_tokenizer",
    "KVCache": ".cache",
    "Model": ".model",
    "ModelDescription": ".description",
    "Request": ".request",
    "RequestError": ".errors",
    "SamplingParams": ".params",
    "Statistics": ".statistics",
    "TextCodec": ".model",
    "TokenLogprob": ".sampling",
    "Tokenizer": ".tokenizer",
    "TokenizerError": ".errors",
    "Usage": ".request",
    "sample": ".sampling",
}

__all__ = sorted([*_EXPORTS, load.__name__, load_onnx.__name__, save.__name__])


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
