"""Front ends: import of models of other formats as placed Relax modules.

Public names are loaded on first use, because a compiled language model only needs the reader of its tokenizer's file.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
