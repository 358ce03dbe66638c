"""Compilation of modules to executables."""

from . import guard_tvm_compile
from .compile import compile, get_pipeline

__all__ = ["compile", "get_pipeline"]

guard_tvm_compile.install()
