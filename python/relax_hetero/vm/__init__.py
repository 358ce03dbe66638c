"""Executables and the virtual machine that runs them; needs TVM's runtime only."""

from __future__ import annotations

from .binding_table import BindingTable
from .bound_function import BoundFunction
from .command_buffer import CommandBuffer
from .executable import Executable
from .load import load
from .machine import VirtualMachine
from .metadata import ConstantSpec, DeviceSpec, DispatchSpec, Metadata
from .profile import Profile, ProfileRow
from .signature import FunctionSignature, ObjectSpec, PrimSpec, ShapeSpec, TensorSpec, TupleSpec
from .submission import Submission

__all__ = [
    "BindingTable",
    "BoundFunction",
    "CommandBuffer",
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
    "Submission",
    "TensorSpec",
    "TupleSpec",
    "VirtualMachine",
    "load",
]
