"""Executables and the virtual machine that runs them; needs TVM's runtime only."""

from __future__ import annotations

from .bound_function import BoundFunction
from .executable import Executable
from .load import load
from .machine import VirtualMachine
from .metadata import ConstantSpec, DeviceSpec, DispatchSpec, Metadata
from .profile import Profile, ProfileRow
from .signature import FunctionSignature, ObjectSpec, PrimSpec, ShapeSpec, TensorSpec, TupleSpec

__all__ = [
    "BoundFunction",
    "ConstantSpec",
    "DeviceSpec",
    "DispatchSpec",
    "Executable",
    "FunctionSignature",
    "Metadata",
    "ObjectSpec",
    "PrimSpec",
    "Profile",
    "ProfileRow",
    "ShapeSpec",
    "TensorSpec",
    "TupleSpec",
    "VirtualMachine",
    "load",
]
