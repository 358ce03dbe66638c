"""Language models: the engine that shares one among requests, sampling, tokenizers, chat templates and the server.

Names are resolved on first use: the server and tokenizers need packages of their own, and the help of commands that
import this needs no TVM.
"""

from typing import Any

import lazy_loader

from ..garbage_collection import paused_garbage_collection

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@paused_garbage_collection()
def __getattr__(name: str) -> Any:
    return _import_name(name)
