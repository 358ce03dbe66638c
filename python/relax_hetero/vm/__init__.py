"""Executables and the virtual machine that runs them; needs TVM's runtime only."""

from __future__ import annotations

from .executable import Executable
from .metadata import ConstantSpec, DeviceSpec, DispatchSpec, Metadata
from .signature import FunctionSignature, ObjectSpec, PrimSpec, ShapeSpec, TensorSpec, TupleSpec

__all__ = [
    "ConstantSpec",
    "DeviceSpec",
    "DispatchSpec",
    "Executable",
    "FunctionSignature",
    "Metadata",
    "ObjectSpec",
    "PrimSpec",
    "ShapeSpec",
    "TensorSpec",
    "TupleSpec",
]
