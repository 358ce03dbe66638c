"""Clusters: one module over several hosts, on Ray (extra ``relax-hetero[cluster]``).

Names are resolved on first use, so that a host's process can set its number of threads before TVM is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
