"""Addresses of the kernels of loaded code, by which they are called as plain functions."""

from __future__ import annotations

from tvm import runtime

from ..errors import BindingError


def address_function(kernel: str) -> str:
    """The name of the packed function that tells a kernel's address."""
    return f"relax_hetero.address.{kernel}"


def kernel_address(module: runtime.Module, kernel: str) -> int:
    """The address of a kernel in this process.

    Parameters
    ----------
    module : runtime.Module
        Loaded code (`Executable.runnable`).
    kernel : str
        Its symbol, as in `ConstantSpec.addresses` and `KernelSpec.symbol`.

    Raises
    ------
    BindingError
        Code that has no such kernel.
    """
    name = address_function(kernel)
    try:
        return int(module.get_function(name, True)())
    except AttributeError:
        raise BindingError(
            f"kernel {kernel!r} cannot be called by address: the code has no function {name!r}"
        ) from None
