"""An interpreter of GPU kernels on the CPU, which tests kernels on machines without a GPU.

`run(func, *arrays)` lowers a PrimFunc as TVM does for CUDA devices, up to the point where C++ would be written, and
executes the blocks with numpy: all threads of a block are one axis of its arrays. What a GPU would hide until the wrong
day is an error here (`KernelFault`): a race, a barrier that some threads miss, an index out of a buffer, memory that is
read and was never written, a copy or a tensor-core product that nobody waited for.
"""

from .faults import KernelFault
from .launch import run
from .lowering import lowered

__all__ = ["KernelFault", "lowered", "run"]
