"""Language models: the engine that shares one among requests, sampling, tokenizers, chat templates and the server.

Names are resolved on first use: the server and tokenizers need packages of their own, and the help of commands that
import this needs no TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..providers import on_first_use

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
    "Prompt": ".special_tokens",
    "Request": ".request",
    "RequestError": ".errors",
    "SamplingParams": ".params",
    "Statistics": ".statistics",
    "TextCodec": ".model",
    "TokenLogprob": ".sampling",
    "Tokenizer": ".tokenizer",
    "TokenizerError": ".errors",
    "Usage": ".request",
    "load": ".loaded_model",
    "load_onnx": ".onnx_decoder",
    "sample": ".sampling",
    "save": ".loaded_model",
}

__all__ = sorted(_EXPORTS)


if TYPE_CHECKING:  # what checkers and editors see: a test compares these names with those of _EXPORTS
    from .cache import CacheLayer as CacheLayer
    from .cache import KVCache as KVCache
    from .chat_template import ChatTemplate as ChatTemplate
    from .compiled_model import CompiledModel as CompiledModel
    from .description import ModelDescription as ModelDescription
    from .engine import Engine as Engine
    from .errors import EngineClosedError as EngineClosedError
    from .errors import EngineFullError as EngineFullError
    from .errors import RequestError as RequestError
    from .errors import TokenizerError as TokenizerError
    from .json_tokenizer import JsonTokenizer as JsonTokenizer
    from .loaded_model import load as load
    from .loaded_model import save as save
    from .model import Cache as Cache
    from .model import Model as Model
    from .model import TextCodec as TextCodec
    from .onnx_decoder import load_onnx as load_onnx
    from .params import SamplingParams as SamplingParams
    from .request import Request as Request
    from .request import Usage as Usage
    from .sampling import TokenLogprob as TokenLogprob
    from .sampling import sample as sample
    from .special_tokens import Prompt as Prompt
    from .statistics import Statistics as Statistics
    from .text_stream import Delta as Delta
    from .tokenizer import Tokenizer as Tokenizer

else:  # a name that is not among them is an error to checkers
    __getattr__ = on_first_use(__name__, _EXPORTS, globals())


def __dir__() -> list[str]:
    return __all__
