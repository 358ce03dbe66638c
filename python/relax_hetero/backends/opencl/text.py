"""OpenCL C of kernels: TVM's text with unrolled loops, aligned vectors, shuffles and sizes of work-groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import structural_map, structural_walk

from ...errors import BuildError
from .devices import BYTE_DOT

_MARK = "unrolled"  # prefix of the names of variables of unrolled loops, which the text is searched for

# C functions that TVM calls for float32; OpenCL C overloads the names without the suffix.
_SUFFIXED = re.compile(
    r"\b((?:a?(?:cos|sin|tan)h?|atan2|exp(?:2|10|m1)?|log(?:2|10|1p)?|erfc?|sqrt|cbrt|pow|fmod|hypot|ldexp"
    r"|floor|ceil|round|trunc|rint|fabs|copysign|nextafter))f\("
)
_SELECT = re.compile(r"\bselect\(")  # ambiguous for short integers, whose sums are ints
_CHOOSE = "#define choose(other, value, condition) ((condition) ? (value) : (other))\n"
_UNROLLED = re.compile(rf"^( *)for \(int {_MARK}", re.MULTILINE)
_ACCESS = re.compile(r"\bv(load|store)(\d+)\(")
_ARRAY = re.compile(r"(__global|__local) (?:const )?(\w+)(?:\*(?: restrict)?)? (\w+)(?=[,)\[])")
_POINTER = re.compile(r"(\w+) \+ .*", re.DOTALL)
_LOCAL = re.compile(r"^(  __local \w+ \w+\[\d+\]);", re.MULTILINE)
_BODY = re.compile(r"^__kernel void .*\{$", re.MULTILINE)

_SHUFFLE = re.compile(r"\bshuffle_xor_(\w+)\(")
_HALF_VALUE = re.compile(r"\bhalf\d*\b(?!\*)")
_FP16 = re.compile(r"#ifdef cl_khr_fp16\n(?:.*\n)*?#endif\n+")
_HALF = re.compile(r"\b(?:float_of_half|half_of_float)\(")
_SHUFFLES = """\
#ifndef EXCHANGED
#ifdef __NV_CL_C_VERSION
#define WARP_GROUP
#define EXCHANGE(items)
#define EXCHANGED 0
uint shuffle_xor_uint(__local uint* exchange, uint value, uint distance) {
  uint other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(other) : "r"(value), "r"(distance));
  return other;
}
#elif defined(cl_intel_required_subgroup_size) && defined(cl_khr_subgroup_shuffle)
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#define WARP_GROUP __attribute__((intel_reqd_sub_group_size(32)))
#define EXCHANGE(items)
#define EXCHANGED 0
uint shuffle_xor_uint(__local uint* exchange, uint value, uint distance) {
  return sub_group_shuffle_xor(value, distance);
}
#else
#define WARP_GROUP
#define EXCHANGE(items) __local uint exchange[items];
#define EXCHANGED exchange
uint shuffle_xor_uint(__local uint* exchange, uint value, uint distance) {
  uint item = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  exchange[item] = value;
  barrier(CLK_LOCAL_MEM_FENCE);
  return exchange[item ^ distance];
}
#endif
float shuffle_xor_float(__local uint* exchange, float value, uint distance) {
  return as_float(shuffle_xor_uint(exchange, as_uint(value), distance));
}
int shuffle_xor_int(__local uint* exchange, int value, uint distance) {
  return as_int(shuffle_xor_uint(exchange, as_uint(value), distance));
}
ulong shuffle_xor_ulong(__local uint* exchange, ulong value, uint distance) {
  uint2 words = as_uint2(value);
  uint low = shuffle_xor_uint(exchange, words.x, distance);
  return as_ulong((uint2)(low, shuffle_xor_uint(exchange, words.y, distance)));
}
long shuffle_xor_long(__local uint* exchange, long value, uint distance) {
  return as_long(shuffle_xor_ulong(exchange, as_ulong(value), distance));
}
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
double shuffle_xor_double(__local uint* exchange, double value, uint distance) {
  return as_double(shuffle_xor_ulong(exchange, as_ulong(value), distance));
}
#endif
#endif
"""
"""Exchange of values within runs of 32 work-items, which all work-items of a group take part in.

NVIDIA's compiler lacks sub-groups but knows PTX. On other devices sub-groups of 32 in the order of work-items exist
where a kernel can require their size.
"""
_C_NAMES = {
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "uint32": "uint",
    "int64": "long",
    "uint64": "ulong",
}


_HALVES = """\
#ifndef HALVES
#define HALVES
float float_of_half(ushort bits) { return vload_half(0, (const __private half*)&bits); }
ushort half_of_float(float value) {
  ushort bits;
  vstore_half_rte(value, 0, (__private half*)&bits);
  return bits;
}
#endif
"""
"""Conversions of bits, which devices without float16 arithmetic support, too."""


_BYTE_DOTS = """\
#ifndef BYTE_DOT
#define BYTE_SUM(name, Left, Right, khr, ptx) int name(int left, int right, int addend) { \\
  Left one = as_##Left(left); \\
  Right other = as_##Right(right); \\
  return (int)one.x * other.x + (int)one.y * other.y + (int)one.z * other.z + (int)one.w * other.w + addend; \\
}
#define BYTE_DOT_OF_OTHER_SIGN BYTE_DOT
#if defined(cl_khr_integer_dot_product) && defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
#define BYTE_DOT(name, Left, Right, khr, ptx) int name(int left, int right, int addend) { \\
  return (int)dot_4x8packed_##khr(as_uint(left), as_uint(right)) + addend; \\
}
#elif defined(cl_arm_integer_dot_product_int8)
#pragma OPENCL EXTENSION cl_arm_integer_dot_product_int8 : enable
#undef BYTE_DOT_OF_OTHER_SIGN
#define BYTE_DOT_OF_OTHER_SIGN BYTE_SUM
#define BYTE_DOT(name, Left, Right, khr, ptx) int name(int left, int right, int addend) { \\
  return (int)arm_dot(as_##Left(left), as_##Right(right)) + addend; \\
}
#elif defined(__NV_CL_C_VERSION)
#define BYTE_DOT(name, Left, Right, khr, ptx) int name(int left, int right, int addend) { \\
  int sum; \\
  asm("dp4a." ptx " %0, %1, %2, %3;" : "=r"(sum) : "r"(left), "r"(right), "r"(addend)); \\
  return sum; \\
}
#else
#define BYTE_DOT BYTE_SUM
#endif
BYTE_DOT(byte_dot_ii, char4, char4, ss_int, "s32.s32")
BYTE_DOT(byte_dot_uu, uchar4, uchar4, uu_uint, "u32.u32")
BYTE_DOT_OF_OTHER_SIGN(byte_dot_iu, char4, uchar4, su_int, "s32.u32")
BYTE_DOT_OF_OTHER_SIGN(byte_dot_ui, uchar4, char4, us_int, "u32.s32")
#endif
"""
"""Dot products of four bytes: Khronos' extension, Arm's, which requires equal signs, or NVIDIA's PTX.

Elsewhere sums of products, for which compilers have instructions.
"""


def with_own_functions(kernels: tvm.IRModule) -> tvm.IRModule:
    """Replace shuffles and conversions of bits of float16 by calls of functions that `generate` defines."""

    def widen(node: tirx.Cast) -> tvm.ir.Expr:
        value = node.value
        if str(node.ty.dtype) == "float32" and _is_call(value, "tirx.reinterpret") and _types(value) == _HALF_AND_BITS:
            return tirx.call_extern("float32", "float_of_half", value.args[0])
        return node

    def rewrite(call: tvm.ir.Call) -> tvm.ir.Expr:
        if _is_call(call, "tirx.reinterpret") and _types(call) == _HALF_AND_BITS[::-1]:
            value = call.args[0]
            if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "float32":
                return tirx.call_extern("uint16", "half_of_float", value.value)
        # TVM's legalization of bfloat16 makes values of it float32, also those between reinterpretations of their bits.
        if _is_call(call, "tirx.reinterpret") and _types(call) == ("uint16", "bfloat16"):
            value = call.args[0]
            if _is_call(value, "tirx.reinterpret"):
                return value.args[0]
            rounded = tirx.reinterpret("uint32", tirx.Cast("float32", value))
            return tirx.Cast("uint16", tirx.shift_right(rounded, tirx.const(16, "uint32")))
        if not isinstance(call.op, tvm.ir.Op) or not call.op.name.startswith("tirx.tvm_warp_shuffle"):
            return call
        _, value, distance, *_ = call.args
        dtype = str(value.ty.dtype)
        if call.op.name != "tirx.tvm_warp_shuffle_xor" or dtype not in _C_NAMES:
            raise BuildError(f"OpenCL: found {call.op.name} of {dtype}, expected tvm_warp_shuffle_xor of 4 or 8 bytes")
        return tirx.call_extern(dtype, f"shuffle_xor_{_C_NAMES[dtype]}", value, distance)

    rules = (tirx.Cast, widen), (tvm.ir.Call, rewrite)
    functions = {gv: structural_map(func, rules, order="pre") for gv, func in kernels.functions.items()}
    return tvm.IRModule(functions, attrs=kernels.attrs)


_HALF_AND_BITS = ("float16", "uint16")


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, tvm.ir.Call) and isinstance(node.op, tvm.ir.Op) and node.op.name == name


def _types(reinterpret: tvm.ir.Call) -> tuple[str, str]:
    """Types that a value gets, and that it has."""
    return str(reinterpret.ty.dtype), str(reinterpret.args[0].ty.dtype)


def generate(
    kernel: tvm.IRModule, write: Callable[[tvm.IRModule, tvm.target.Target], str], target: tvm.target.Target
) -> str:
    """Text of a kernel, for which TVM's generator is `write`."""
    text = _SUFFIXED.sub(r"\1(", write(_with_bound_lets(_with_marked_loops(kernel)), target))
    text = _UNROLLED.sub(r"\1#pragma unroll\n\g<0>", text)
    if _SELECT.search(text):
        text = _CHOOSE + _SELECT.sub("choose(", text)
    text = _with_aligned_vectors(text)
    (func,) = kernel.functions.values()
    if sizes := _work_group(func):
        # Compilers give each work-item the registers that a group of this size leaves it, not one of the maximum size.
        text = _BODY.sub(f"__attribute__((reqd_work_group_size({', '.join(map(str, sizes))})))\n\\g<0>", text)
    if not _HALF_VALUE.search(text):
        text = _FP16.sub("", text)  # pointers to half need no extension
    if _HALF.search(text):
        text = _HALVES + text
    if BYTE_DOT in text:
        text = _BYTE_DOTS + text
    if _SHUFFLE.search(text):
        assert sizes, "blocks with shuffles have a fixed size"
        text = _SHUFFLE.sub(r"shuffle_xor_\1(EXCHANGED, ", text)
        text = _SHUFFLES + _BODY.sub(f"WARP_GROUP\n\\g<0>\n  EXCHANGE({prod(sizes)})", text)
    # Kernels exchange values in global memory, too, as CUDA's barriers allow.
    return text.replace("barrier(CLK_LOCAL_MEM_FENCE)", "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)")


def _with_marked_loops(kernel: tvm.IRModule) -> tvm.IRModule:
    """Name the variables of unrolled loops by `_MARK`: TVM's generator of OpenCL C writes them as plain loops."""

    def mark(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.UNROLLED:
            return loop
        var = tirx.Var(f"{_MARK}_{loop.loop_var.name}", loop.loop_var.ty)
        body = structural_map(loop.body, (tvm.ir.Var, lambda each: var if each.same_as(loop.loop_var) else each))
        return tirx.For(var, loop.min, loop.extent, loop.kind, body)

    return tvm.IRModule({gv: structural_map(func, (tirx.For, mark)) for gv, func in kernel.functions.items()})


def _with_bound_lets(kernel: tvm.IRModule) -> tvm.IRModule:
    """Bind variables of expressions before stores: TVM's generator declares them in the middle of a vector's store."""

    def bind(store: tirx.BufferStore) -> tirx.Stmt:
        bindings: dict[tirx.Var, tirx.Stmt] = {}

        def take(let: tirx.Let) -> tvm.ir.Expr:
            bindings.setdefault(let.var, tirx.Bind(let.var, let.value))
            return let.body

        without_lets = structural_map(store, (tirx.Let, take))
        return tirx.SeqStmt([*bindings.values(), without_lets]) if bindings else store

    rule = (tirx.BufferStore, bind)
    return tvm.IRModule({gv: structural_map(func, rule) for gv, func in kernel.functions.items()})


def _work_group(func: Any) -> list[int] | None:
    """Work-items of a group along each dimension; None if only the launch knows them."""
    sizes: list[Any] = [1, 1, 1]

    def visit(node: tirx.AttrStmt) -> None:
        if node.attr_key == "thread_extent" and (name := str(node.node.thread_tag)).startswith("threadIdx."):
            sizes["xyz".index(name[-1])] = int(node.value) if isinstance(node.value, tirx.IntImm) else None

    structural_walk(func.body, (tirx.AttrStmt, visit))
    return None if None in sizes else sizes


def _with_aligned_vectors(text: str) -> str:
    """Replace TVM's vector accesses of global and local memory, whose alignment is that of an element, by aligned ones.

    Kernels align vectors to their size, as CUDA requires; compilers split unaligned ones into an access per element.
    """
    arrays = {name: f"{space} {dtype}" for space, dtype, name in _ARRAY.findall(text)}

    def rewrite(part: str) -> Iterator[str]:
        end = 0
        while match := _ACCESS.search(part, end):
            yield part[end : match.start()]
            arguments, end = _arguments(part, match.end())
            kind, lanes = match.groups()
            pointer = "".join(rewrite(arguments[-1]))
            name = _POINTER.fullmatch(pointer)
            dtype = arrays.get(name[1]) if name else None
            place = f"*(({dtype}{lanes}*)({pointer}))"
            if kind == "load":
                yield place if dtype else f"vload{lanes}(0, {pointer})"
            else:
                value = "".join(rewrite(arguments[0]))
                yield f"{place} = {value}" if dtype else f"vstore{lanes}({value}, 0, {pointer})"
        yield part[end:]

    return _LOCAL.sub(r"\1 __attribute__((aligned(16)));", "".join(rewrite(text)))


def _arguments(text: str, begin: int) -> tuple[list[str], int]:
    """Arguments of a call whose parenthesis ends at `begin`, and the position after the call."""
    depth, first, arguments = 0, begin, []
    for position in range(begin, len(text)):
        character = text[position]
        if character == "," and depth == 0 or character == ")" and depth == 0:
            arguments.append(text[first:position].strip())
            first = position + 1
            if character == ")":
                return arguments, first
        depth += (character in "([{") - (character in ")]}")
    raise ValueError(f"the generated text of a kernel ends within a call: {text[begin : begin + 80]}")
