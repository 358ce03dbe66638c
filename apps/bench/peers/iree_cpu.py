"""IREE: one linalg product for llvm-cpu, with data tiling and micro-kernels."""

from __future__ import annotations

import iree.compiler
import iree.runtime
import numpy as np

from .product import Contestant, Product

_ELEMENTS = {"f32": ("f32", "f32", "f32"), "u8s8": ("i8", "i8", "i32"), "s8s8": ("i8", "i8", "i32")}
_ELEMENTS["bf16"] = ("bf16", "bf16", "f32")
_FLAGS = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-data-tiling", "--iree-llvmcpu-enable-ukernels=all"]
_FLAGS.append("--iree-opt-level=O3")
_threads_set: list[int] = []


def matmul(product: Product, threads: int) -> Contestant:
    """The module's function on device buffers; it allocates its result. The weight is packed at compile time."""
    config = iree.runtime.Config(_driver(threads))
    context = iree.runtime.SystemContext(config=config)
    code = iree.compiler.compile_str(_text(product), target_backends=["llvm-cpu"], extra_args=_FLAGS)
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, code))
    main = context.modules.module["main"]
    operands = [_buffer(config.device, product.lhs, product.kind)]
    if not product.weight:
        operands.append(_buffer(config.device, product.rhs, product.kind))
    results: list[iree.runtime.DeviceArray] = []
    # The function does not keep its device and modules alive.
    alive = (config, context)

    def call(alive: object = alive) -> None:
        results[:] = [main(*operands)]

    note = "float32 result" if product.kind == "bf16" else ""
    return Contestant(call, lambda: np.array(results[0].to_host()), note)


def _driver(threads: int) -> str:
    if threads == 1:
        return "local-sync"
    if not _threads_set:  # flags apply to the process, before its first device
        iree.runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
        _threads_set.append(threads)
    return "local-task"


def _buffer(device: iree.runtime.HalDevice, array: np.ndarray, kind: str) -> iree.runtime.DeviceArray:
    types = iree.runtime.HalElementType
    element = {"f32": types.FLOAT_32, "bf16": types.BFLOAT_16}.get(kind, types.INT_8)
    view = device.allocator.allocate_buffer_copy(
        memory_type=iree.runtime.MemoryType.DEVICE_LOCAL | iree.runtime.MemoryType.HOST_VISIBLE,
        allowed_usage=iree.runtime.BufferUsage.DEFAULT | iree.runtime.BufferUsage.MAPPING,
        device=device,
        buffer=array.view({4: "float32", 2: "uint16", 1: "int8"}[array.dtype.itemsize]),
        element_type=element,
    )
    return iree.runtime.DeviceArray(device, view, implicit_host_transfer=False)


def _text(product: Product) -> str:
    """The product in MLIR; the weight's bytes follow as a resource."""
    x_type, w_type, y_type = _ELEMENTS[product.kind]
    shape = product.shape

    def tensor(rows: int, columns: int, element: str) -> str:
        return "tensor<" + "x".join(map(str, (*shape.tensor(rows, columns), element))) + ">"

    x, w, y = tensor(shape.m, shape.k, x_type), tensor(shape.k, shape.n, w_type), tensor(shape.m, shape.n, y_type)
    batch = "b, " if shape.batch else ""
    loops = f"({batch}m, n, k)"
    maps = ", ".join(f"affine_map<{loops} -> ({batch}{dims})>" for dims in ("m, k", "k, n", "m, n"))
    iterators = ", ".join(['"parallel"'] * (3 if shape.batch else 2) + ['"reduction"'])
    weight = f"  %w = arith.constant dense_resource<w> : {w}\n" if product.weight else ""
    text = f"""
func.func @main(%x: {x}{"" if product.weight else f", %w: {w}"}) -> {y} {{
{weight}  %zero = arith.constant {"0.0" if y_type == "f32" else "0"} : {y_type}
  %empty = tensor.empty() : {y}
  %start = linalg.fill ins(%zero : {y_type}) outs(%empty : {y}) -> {y}
  %y = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{iterators}]}}
      ins(%x, %w : {x}, {w}) outs(%start : {y}) {{
  ^bb0(%a: {x_type}, %b: {w_type}, %c: {y_type}):
{_body(product.kind)}
    linalg.yield %sum : {y_type}
  }} -> {y}
  return %y : {y}
}}
"""
    if product.weight:
        # The first word of a resource is its alignment.
        data = "0x40000000" + product.rhs.tobytes().hex()
        text += f'{{-# dialect_resources: {{ builtin: {{ w: "{data}" }} }} #-}}\n'
    return text


def _body(kind: str) -> str:
    if kind == "f32":
        return "    %p = arith.mulf %a, %b : f32\n    %sum = arith.addf %c, %p : f32"
    if kind == "bf16":
        casts = [f"    %{v}1 = arith.extf %{v} : bf16 to f32" for v in "ab"]
        return "\n".join([*casts, "    %p = arith.mulf %a1, %b1 : f32", "    %sum = arith.addf %c, %p : f32"])
    left = "extui" if kind == "u8s8" else "extsi"
    casts = [f"    %a1 = arith.{left} %a : i8 to i32", "    %b1 = arith.extsi %b : i8 to i32"]
    return "\n".join([*casts, "    %p = arith.muli %a1, %b1 : i32", "    %sum = arith.addi %c, %p : i32"])
