"""Errors and classes that programs import from ``onnxruntime.capi.onnxruntime_pybind11_state``."""

from relax_hetero.compat import *  # noqa: F403
from relax_hetero.compat.errors import *  # noqa: F403
