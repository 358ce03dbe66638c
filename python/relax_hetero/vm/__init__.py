"""Executables and the virtual machine that runs them; needs TVM's runtime only."""

from __future__ import annotations

from ..artifact.memory_plan import MemoryPlan
from ..artifact.metadata import ConstantSpec, DeviceSpec, DispatchSpec, Metadata
from ..artifact.schedule import Schedule, Step
from ..artifact.signature import FunctionSignature, ObjectSpec, PrimSpec, ShapeSpec, TensorSpec, TupleSpec
from .command_buffer.binding_table import BindingTable
from .command_buffer.command_buffer import CommandBuffer
from .command_buffer.runners import Submission
from .device.cuda_memory import pinned_array
from .device.tensor_arrays import add_array_methods
from .file.executable import Executable
from .file.load import load
from .machine import BoundFunction, VirtualMachine
from .numpy_ops import register_numpy_op
from .profile import Profile, ProfileRow
from .queue.fence import Fence
from .queue.trace import Trace

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
    "register_numpy_op",
]

add_array_methods()
