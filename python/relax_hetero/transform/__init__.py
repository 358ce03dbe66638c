"""Passes, one per file, named after their effect. A pass is a CamelCase function that returns a ``tvm.transform.Pass``.

``help(rh.transform.FormRows)`` says what a pass does, what it assumes, and shows a program before and after;
`passes` lists all of them, `find_pass` finds one by name.

Importing this package makes TVMScript's device look-up strict (see `relax_hetero.op`).
"""

import lazy_loader

from .. import op as _op  # noqa: F401 (makes TVMScript strict before a pass sees a module)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
