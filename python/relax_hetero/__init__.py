"""relax_hetero: one TVM Relax model over several devices.

Names are imported on first use, so that a process with TVM's runtime only can load and run executables.

Importing this package makes TVMScript look up vdevices strictly, whenever TVM is imported, and keeps TVM from importing
PyTorch (`import_hooks`).
"""

from __future__ import annotations

from typing import Any

import lazy_loader

from .garbage_collection import paused_garbage_collection
from .import_hooks import install_import_hooks
from .providers import provide

__version__ = "0.1.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        with paused_garbage_collection():
            return _import_name(name)
    except Exception as error:  # TVM's own modules fail in many ways without the compiler
        if name not in __all__ or not _runtime_only():
            raise
        from .errors import HeteroError

        raise HeteroError(f"relax_hetero.{name} needs TVM's compiler: found TVM's runtime only") from error


def _runtime_only() -> bool:
    from tvm import base

    return bool(base._RUNTIME_ONLY)


# Extension points that lower packages need from higher ones, which may import the compiler: device kinds, compilation
# of command buffers recorded by hand, and reports on an executable.
provide("backends", f"{__name__}.backends", "BACKENDS")
provide("compile_commands", f"{__name__}.driver.commands.compile_commands", "compile_commands")
provide("device_costs", f"{__name__}.frontend.auto.cost_model", "device_costs")
provide("explain", f"{__name__}.report.text.explanation", "explain")
provide("report", f"{__name__}.report.written_report", "write_report")
install_import_hooks()
