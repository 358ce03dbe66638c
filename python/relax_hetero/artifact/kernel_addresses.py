"""Addresses of kernels in loaded code, for calls as C functions."""

from __future__ import annotations

from tvm import runtime

from ..errors import BindingError


def address_function(kernel: str) -> str:
    """The name of the packed function that returns a kernel's address."""
    return f"relax_hetero.address.{kernel}"


def kernel_address(module: runtime.Module, kernel: str) -> int:
    """The address of a kernel in this process.

    `module`: loaded code (`Executable.runnable_module`). `kernel`: symbol, as in `ConstantSpec.addresses` and
    `KernelSpec.symbol`. Raises BindingError for code without this kernel.
    """
    name = address_function(kernel)
    try:
        return int(module.get_function(name, True)())
    except AttributeError:
        raise BindingError(
            f"kernel {kernel!r} cannot be called by address: the code has no function {name!r}"
        ) from None
