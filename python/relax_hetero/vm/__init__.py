"""Executables and the virtual machine that runs them; needs TVM's runtime only."""

from __future__ import annotations

from .binding_table import BindingTable
from .bound_function import BoundFunction
from .command_buffer import CommandBuffer
from .executable import Executable
from .fence import Fence
from .load import load
from .machine import VirtualMachine
from .memory_plan import MemoryPlan
from .metadata import ConstantSpec, DeviceSpec, DispatchSpec, Metadata
from .pinned_memory import pinned_array
from .profile import Profile, ProfileRow
from .schedule import Schedule, Step
from .signature import FunctionSignature, ObjectSpec, PrimSpec, ShapeSpec, TensorSpec, TupleSpec
from .submission import Submission
from .trace import Trace

__all__ = [
    "BindingTable",
    "BoundFunction",
    "CommandBuffer",
    "ConstantSpec",
    "DeviceSpec",
    "DispatchSpec",
    "Executable",
    "Fence",
    "FunctionSignature",
    "MemoryPlan",
    "Metadata",
    "ObjectSpec",
    "PrimSpec",
    "Profile",
    "ProfileRow",
    "Schedule",
    "ShapeSpec",
    "Step",
    "Submission",
    "TensorSpec",
    "Trace",
    "TupleSpec",
    "VirtualMachine",
    "load",
    "pinned_array",
]
