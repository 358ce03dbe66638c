"""Front ends: models of other formats become placed Relax modules.

The functions that do it are `relax_hetero.from_onnx` and its like. Names are resolved on first use: a language model
that was compiled before reads its tokenizer's file here, and needs no importer of anything else.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
