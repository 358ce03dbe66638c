"""Ops become call_tir of kernels, and every variable keeps its device.

Variables get unique names first, so that their devices can be put back after TVM's LegalizeOps (`keep_devices`). An op
without a kernel is an error that names op, variable and operands; `is_kept` says which ops need none.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ...errors import BuildError
from ...op.traits import traits_of
from ..ir.blocks import shape_of, tensor_type
from ..ir.op_names import CONCAT, RESHAPE
from ..ir.reasons import reason
from ..ir.remarks import operand_text
from ..ir.rewriting import (
    copy_module,
    map_bindings,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
    with_functions,
)
from . import formula_kernels, narrow_types, sort_kernels
from .keep_devices import keep_devices
from .numpy_kernels import legalizations, truth_legalizations

_SORTS_AND_SCANS = frozenset(f"relax.{name}" for name in ("bucketize", "sort", "argsort", "topk", "cumsum", "cumprod"))
# Their stock kernels compute with halves in float32, and give that back.
_OF_ANOTHER_TYPE = ("relax.nn.batch_norm",)
MAX_OPERANDS = 32
"""Tensors that one concatenation takes. Its kernel is a choice in a choice for each of them, in which TVM recurses."""
_WITHOUT_PATTERN = 8  # TVM's number for a kernel that is fused with no other
_KEPT_PREFIXES = ("relax.builtin.", "relax.memory.", "relax.vm.", "relax.inspect.", "relax.hetero.")


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Lower every op of a placed module to kernels, keeping each on its device.

    Raises
    ------
    BuildError
        An op has no kernel for its operands.
    """
    mod, variables = with_unique_names(_simplified(mod))
    _check_types(mod, variables)
    try:
        legal = _with_wide_kernels_apart(_with_kernels(mod))
    except Exception:  # an op's own legalization raises what it likes, and names nothing
        _blame(mod, variables)
        raise
    _check(legal, variables)
    return keep_devices(legal, variables)


def _with_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    kernels = legalizations() | sort_kernels.legalizations()
    kernels |= truth_legalizations(kernels)
    kernels |= formula_kernels.legalizations(kernels)
    kernels |= narrow_types.legalizations(kernels)
    legalized = relax.transform.LegalizeOps(kernels | {name: _of_its_type(name) for name in _OF_ANOTHER_TYPE})
    mod = _unconverted(legalized, mod)
    if any(op_name(b.value) in _SORTS_AND_SCANS for _, func in relax_functions(mod) for b in walk_bindings(func)):
        # Sorts have no legalization but a kernel per kind of target.
        mod = _unconverted(legalized, relax.backend.DispatchSortScan()(mod))
    return mod


@tvm.ir.instrument.pass_instrument
class _WithoutConvertSsa:
    """Skips ConvertSSA, which LegalizeOps runs where it copied a kernel for each target.

    Of a copy, the pass renames symbolic sizes in the buffers that a block allocates, but not where these are used.
    The copies are merged again (`forget_targets`), which needs them alike.
    """

    def should_run(self, _: tvm.IRModule, info: tvm.transform.PassInfo) -> bool:
        return str(info.name) != "s_tir.ConvertSSA"


def _unconverted(work: tvm.transform.Pass, mod: tvm.IRModule) -> tvm.IRModule:
    """`work(mod)` without ConvertSSA; instruments of the caller, which a context would start anew, do not see it."""
    context = tvm.transform.PassContext.current()
    lists = list(context.required_pass), list(context.disabled_pass)
    with tvm.transform.PassContext(int(context.opt_level), *lists, [_WithoutConvertSsa()], dict(context.config)):
        return work(mod)


def _of_its_type(name: str) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The stock legalization of an op with several results, each cast to the type that the op gives it."""
    stock = tvm.ir.Op.get(name).get_attr("FLegalize")

    def legalize_op(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        made = builder.normalize(stock(builder, call))
        wanted = list(call.ty.fields)
        if [field.dtype for field in made.ty.fields] == [field.dtype for field in wanted]:
            return made
        results = builder.emit(made)
        cast = tvm.ir.Op.get("relax.astype").get_attr("FLegalize")
        fields = [builder.emit(relax.TupleGetItem(results, number)) for number in range(len(wanted))]
        return relax.Tuple(
            [
                field
                if field.ty.dtype == ty.dtype
                else builder.emit(cast(builder, builder.normalize(relax.op.astype(field, ty.dtype))))
                for field, ty in zip(fields, wanted, strict=True)
            ]
        )

    return legalize_op


def is_kept(name: str) -> bool:
    """Return whether an op is carried out as it is, not by a kernel."""
    traits = traits_of(name)
    return traits.needs_no_kernel or (name.startswith(_KEPT_PREFIXES) and not traits.is_elementwise)


def _simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """``(a, b)[0]`` becomes ``a``: FuseOps takes apart a tuple written inside an expression and loses its fields.

    Operands that are variables of a known shape become that shape: legalizations want it written out.
    """

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value = binding.value
        if op_name(value) == CONCAT and isinstance(binding.var.ty, relax.TensorType):
            return _few_at_a_time(binding)
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            return relax.VarBinding(binding.var, value.tuple_value.fields[value.index], binding.span)
        name = op_name(value)
        if name is None or is_kept(name) and name != RESHAPE:
            return binding
        args = [_written_out(arg) for arg in value.args]
        if all(new is old for new, old in zip(args, value.args, strict=True)):
            return binding
        call = relax.Call(value.op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    return relax.transform.CanonicalizeBindings()(copy_module(mod, functions))


def _few_at_a_time(binding: relax.Binding) -> list[relax.Binding]:
    """A concatenation of many tensors as some of fewer, in order."""
    made: list[relax.Binding] = []
    value, ty = binding.value, binding.var.ty
    operands = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else []
    axis = int(value.attrs.axis) if value.attrs.axis is not None else 0
    if len(operands) <= MAX_OPERANDS or any(shape_of(operand) is None for operand in operands):
        return [binding]
    axis += int(ty.ndim) if axis < 0 else 0
    while len(operands) > MAX_OPERANDS:
        groups = [operands[at : at + MAX_OPERANDS] for at in range(0, len(operands), MAX_OPERANDS)]
        operands = []
        for group in groups:
            shapes = [shape_of(one) or [] for one in group]
            shape = [*shapes[0]]
            shape[axis] = sum((other[axis] for other in shapes[1:]), start=shape[axis])
            part = type(binding.var)(f"{binding.var.name}_part{len(made)}", tensor_type(shape, str(ty.dtype), ty))
            made.append(relax.VarBinding(part, typed(relax.op.concat(group, axis), part.ty)))
            operands.append(part)
    return [*made, relax.VarBinding(binding.var, typed(relax.op.concat(operands, axis), ty), binding.span)]


def _with_wide_kernels_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels of very many tensors marked as fused with nothing, which would make them wider yet."""
    wide = {
        gv: func.with_attr("op_pattern", _WITHOUT_PATTERN)
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and len(func.params) > MAX_OPERANDS and "op_pattern" not in func.attrs
    }
    return with_functions(mod, wide)


def _written_out(arg: relax.Expr) -> relax.Expr:
    is_shape = isinstance(arg, relax.Var) and isinstance(arg.ty, relax.ShapeType) and arg.ty.values is not None
    return relax.ShapeExpr(arg.ty.values) if is_shape else arg


def _check_types(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Refuse arithmetic with types for which stock kernels compute wrong numbers, crash, or fail to compile."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value)
            if name is None or is_kept(name):
                continue
            dtype = narrow_types.refused_type(binding.value)
            if dtype is not None:
                var = variables.get(gv.name_hint, {}).get(binding.var.name, binding.var)
                raise BuildError(
                    f"op {name} of variable {var.name!r} in function {gv.name_hint!r} has no kernel of CPUs for "
                    f"elements of type {dtype}: expected a type that they compute with, such as int32 or float32"
                )


def _check(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Refuse what would fail at run time: an op that is neither a kernel nor the VM's own."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value)
            if name is not None and not is_kept(name):
                raise _no_kernel(binding, gv.name_hint, variables)


def _blame(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Raise for the first op whose legalization fails alone; nothing where each succeeds."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            if op_name(binding.value) is None or isinstance(binding, relax.MatchCast):
                continue
            var = relax.Var(binding.var.name, binding.var.ty)  # a variable of a dataflow block cannot be returned
            block = relax.BindingBlock([relax.VarBinding(var, binding.value, binding.span)])
            body = typed(relax.SeqExpr([block], var), var.ty)
            alone = relax.Function(relax.analysis.free_vars(binding.value), body, var.ty, is_pure=False)
            try:
                _with_kernels(copy_module(mod, {tvm.ir.GlobalVar("alone"): alone}))
            except Exception as error:  # as above
                raise _no_kernel(binding, gv.name_hint, variables, reason(error)) from error


def _no_kernel(
    binding: relax.Binding,
    function: str,
    variables: dict[str, dict[str, relax.Var]],
    why: str = "expected an op with a legalization and operand shapes that are known (or symbolic)",
) -> BuildError:
    var = variables.get(function, {}).get(binding.var.name, binding.var)
    operands = ", ".join(map(operand_text, binding.value.args))
    return BuildError(
        f"op {op_name(binding.value)} of variable {var.name!r} in function {function!r} has no kernel for operands "
        f"({operands}): {why}"
    )


def with_unique_names(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, dict[str, relax.Var]]]:
    """Number the parameters and bindings of every Relax function that share a name with an earlier one.

    Returns
    -------
    mod : tvm.IRModule
    variables : dict
        Function name to new variable name to the variable as it was.
    """
    functions = dict(mod.functions.items())
    variables: dict[str, dict[str, relax.Var]] = {}
    for gv, func in relax_functions(mod):
        functions[gv], variables[gv.name_hint] = _rename(func)
    return copy_module(mod, functions), variables


def _rename(func: relax.Function) -> tuple[relax.Function, dict[str, relax.Var]]:
    old_of: dict[str, relax.Var] = {}
    renamed: dict[relax.Var, relax.Var] = {}
    counts: dict[str, int] = {}
    for var in (*func.params, *(binding.var for binding in walk_bindings(func))):
        name = var.name
        while name in old_of:
            counts[var.name] = counts.get(var.name, 0) + 1
            name = f"{var.name}_{counts[var.name]}"
        old_of[name] = var
        if name != var.name:
            renamed[var] = type(var)(name, var.ty, var.span)
    if not renamed:
        return func, old_of
    return structural_map(func, (relax.Var, lambda var: renamed.get(var, var))), old_of
