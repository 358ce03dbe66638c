"""Clusters of hosts: one module over several machines, on Ray (extra ``relax-hetero[cluster]``).

Names are resolved on first use, so that a host's process sets the number of its threads before TVM is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
