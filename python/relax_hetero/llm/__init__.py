"""Language models: the engine that shares one among requests, sampling, tokenizers, chat templates and the server.

Names are resolved on first use: the server and tokenizers need packages of their own, and the help of commands that
import this needs no TVM.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
