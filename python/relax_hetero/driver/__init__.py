"""Compilation of modules to executables.

Public names are loaded on first use, because a model that is in the compile cache needs no pass.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
