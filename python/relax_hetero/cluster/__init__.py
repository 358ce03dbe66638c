"""Clusters: one module over several hosts, on Ray (extra ``relax-hetero[cluster]``).

Names are resolved on first use, since imports take time.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
