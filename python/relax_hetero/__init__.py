"""relax_hetero: one TVM Relax model over several devices.

Names are resolved on first use, so that a process with only TVM's runtime can still load and run an
executable: nothing here imports the compiler before a compiler name is asked for.

Importing this package makes TVMScript look vdevices up strictly, whenever TVM is imported.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

from .providers import provide
from .watch_tvmscript import watch_tvmscript

__version__ = "0.1.0"

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except Exception as error:  # TVM's own modules fail in many ways without the compiler
        if name not in __all__ or not _runtime_only():
            raise
        from .errors import HeteroError

        raise HeteroError(f"relax_hetero.{name} needs TVM's compiler: found TVM's runtime only") from error


def _runtime_only() -> bool:
    from tvm import base

    return bool(base._RUNTIME_ONLY)


# What a process with TVM's runtime alone does without, and asks of the compiler's packages where they are installed:
# the kinds of devices that the library knows, command buffers that a program records, and reports on an executable.
provide("backends", f"{__name__}.backends", "BACKENDS")
provide("compile_commands", f"{__name__}.driver.commands.compile_commands", "compile_commands")
provide("explain", f"{__name__}.report.text.explanation", "explain")
provide("report", f"{__name__}.report.written_report", "write_report")
watch_tvmscript()
