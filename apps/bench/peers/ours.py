"""This library: ``rh.compile`` of the stock module, called through its virtual machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import tvm

import relax_hetero as rh

from .four_bits import onnx_model
from .product import Contestant, Product, empty
from .relax_module import native_target, relax_module, tensor


def matmul(product: Product, threads: int) -> Contestant:
    """``vm["main"](x)`` on a tensor; the machine allocates its result, like some of the peers."""
    if product.kind == "q4":
        module = rh.from_onnx(onnx_model(product.shape, product.blocks), [native_target(threads)])
    else:
        module = rh.transform.UpdateVDevice(rh.VDevice(native_target(threads)))(relax_module(product))
    begin = time.perf_counter()
    executable = rh.compile(module, cache=False)
    seconds = time.perf_counter() - begin
    machine = rh.vm.VirtualMachine(executable)
    main = machine["main"]
    operands = [tensor(product.lhs)] + ([] if product.weight else [tensor(product.rhs)])
    results: list[tvm.runtime.Tensor] = []

    def call() -> None:
        results.clear()  # frees its memory for the next call
        results.append(main(*operands))

    kernel = _kernel(executable, product, operands)
    return Contestant(call, lambda: results[0].numpy(), kernel=kernel, compile_seconds=seconds)


def _kernel(
    executable: rh.vm.Executable, product: Product, operands: list[tvm.runtime.Tensor]
) -> Callable[[], object] | None:
    """The compiled kernel alone, if the product is a single kernel, which shows the overhead of the call."""
    symbols, constants = list(executable.metadata.dispatches), list(executable.constants)
    if len(symbols) != 1 or len(constants) != int(product.weight):
        return None
    function = executable.runnable_module().get_function(symbols[0], query_imports=True)
    arguments = [*operands, *constants, tensor(empty(product.result_shape, product.result_dtype))]
    return lambda: function(*arguments)
