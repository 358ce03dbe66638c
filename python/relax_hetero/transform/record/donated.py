"""Donated parameters: what the caller gives a function to overwrite, so that results may lie in its memory.

Before, where the attribute says that `cache` is donated and the kernel ties it to its result (`tir.core.ties`)::

    new = R.call_tir(cls.write_row, (cache, row), out_ty=R.Tensor((64, 16), "float32", "llvm:0"))

After::

    new = R.call_tir_inplace(cls.write_row_in_place, (cache, row), inplace_indices=[0], out_ty=...)

A donated parameter is overwritten by the only work that uses it, be it one kernel or one command buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from ...errors import BuildError
from ..ir.blocks import Block, rewrite_function, same_shape, used_vars
from ..ir.module_attrs import is_lowered
from ..ir.rewriting import copy_module, global_vars_in, op_name, relax_functions, typed, walk_bindings
from .kernel_calls import KernelCalls

DONATED = "relax_hetero.donated"
"""On a Relax function: the numbers of the parameters that it may overwrite."""


def with_donated(mod: tvm.IRModule, donate: Sequence[str] | Mapping[str, Sequence[str]]) -> tvm.IRModule:
    """A module with donated parameters noted on its functions.

    Parameters
    ----------
    mod : tvm.IRModule
    donate : sequence of str, or mapping from function to sequence of str
        Inputs by name; those of ``main`` where no function is named.

    Raises
    ------
    BuildError
        A function or an input that the module lacks, an input that is no tensor or is given once for all calls, a
        function that others call, a module that is lowered already.
    """
    by_function = dict(donate) if isinstance(donate, Mapping) else {"main": donate}
    if is_lowered(mod):
        raise BuildError("donate= needs a module that is not lowered: a lowered one has its results elsewhere already")
    functions = {gv.name_hint: (gv, func) for gv, func in relax_functions(mod)}
    changed = dict(mod.functions.items())
    for name, inputs in by_function.items():
        if name not in functions:
            raise BuildError(f"donate= names function {name!r}, which the module lacks; it has {sorted(functions)}")
        if isinstance(inputs, str) or not all(isinstance(item, str) for item in inputs):
            raise BuildError(f"donate= gives {inputs!r} for function {name!r}, expected a list of input names")
        gv, func = functions[name]
        callers = [caller for caller, (_, f) in functions.items() if gv in relax.analysis.all_global_vars(f)]
        if callers:
            raise BuildError(
                f"donate= names inputs of function {name!r}, which {callers} call with values of their own"
            )
        numbers = [_number(func, name, item) for item in dict.fromkeys(inputs)]
        changed[gv] = func.with_attr(DONATED, numbers)
    return copy_module(mod, changed)


def _number(func: relax.Function, function: str, name: str) -> int:
    names = input_names(func)
    where = f"donate= names {name!r}"
    if name not in names:
        raise BuildError(f"{where}, which function {function!r} does not have; it has {names}")
    number = names.index(name)
    ty = func.params[number].ty
    if not isinstance(ty, relax.TensorType):
        raise BuildError(f"{where} of function {function!r}, which is {ty}, expected a tensor")
    if number >= int(func.attrs.get("num_input", len(names))):
        raise BuildError(f"{where} of function {function!r}, a parameter that set_params gives once for all calls")
    return number


def input_names(func: relax.Function) -> list[str]:
    """What callers know a function's parameters by."""
    names = [str(name) for name in func.attrs.get("input_names", [])]
    return names + [param.name for param in func.params[len(names) :]]


def donated(func: relax.Function) -> list[relax.Var]:
    """The parameters that a function may overwrite."""
    return [func.params[int(number)] for number in func.attrs.get(DONATED, ())]


class DonatedVariables:
    """Which donated parameters of a function a block of it may overwrite.

    Parameters
    ----------
    func : relax.Function
    """

    def __init__(self, func: relax.Function) -> None:
        self._donated = donated(func)
        self._uses: Counter[relax.Var] = Counter()
        if self._donated:
            for binding in walk_bindings(func.body):
                self._uses.update(used_vars(binding.value))

    def of(self, block: Block) -> frozenset[relax.Var]:
        """Those that nothing outside of the block uses."""
        return frozenset(
            var
            for var in self._donated
            if var not in block.used_later and self._uses[var] == len(block.users.get(var, ()))
        )


def UpdateDonated() -> tvm.transform.Pass:
    """Have kernels that are called by themselves write over donated parameters; see the module's docstring.

    Returns
    -------
    tvm.transform.Pass
        Assumes FormDispatches; FormCommandBuffers does the same for command buffers.
    """

    @tvm.transform.module_pass(opt_level=0, name="UpdateDonated")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return mod if is_lowered(mod) else update_donated(mod)

    return run


def update_donated(mod: tvm.IRModule) -> tvm.IRModule:
    """See `UpdateDonated`."""
    kernels = KernelCalls(mod)
    functions = dict(mod.functions.items())
    for gv, func in relax_functions(mod):
        variables = DonatedVariables(func)

        def rewrite(block: Block, variables: DonatedVariables = variables) -> list[relax.Binding] | None:
            free = variables.of(block)
            return [_in_place(binding, block, free, kernels) for binding in block.bindings] if free else None

        functions[gv] = rewrite_function(func, rewrite)
    if not kernels.functions:
        return mod
    used = {gv for func in functions.values() for gv in global_vars_in(func.body)}
    for gv in kernels.replaced:
        if gv not in used and "global_symbol" not in functions[gv].attrs:
            del functions[gv]
    return copy_module(mod, {**functions, **kernels.functions})


def _in_place(binding: relax.Binding, block: Block, free: frozenset[relax.Var], kernels: KernelCalls) -> relax.Binding:
    call = binding.value
    if op_name(call) != "relax.call_tir" or not isinstance(call.ty, relax.TensorType):
        return binding
    kernel, args = call.args[0], call.args[1]
    for operand, result in kernels.ties(kernel):
        if result == len(args.fields) and _is_sole_use(args.fields[operand], args, call.ty, block, free):
            new = kernels.in_place(kernel, (operand, result))
            over = relax.call_tir_inplace(new, args, [operand], [call.ty_args[0]])
            return relax.VarBinding(binding.var, typed(over, call.ty), binding.span)
    return binding


def _is_sole_use(
    value: relax.Expr, args: relax.Tuple, result: relax.TensorType, block: Block, free: frozenset[relax.Var]
) -> bool:
    """Whether a call is all that uses a parameter, as one operand, and the parameter has the form of the result."""
    if value not in free or len(block.users[value]) > 1 or list(args.fields).count(value) > 1:
        return False
    shapes = [ty.shape for ty in (value.ty, result)]
    return all(isinstance(shape, relax.ShapeExpr) for shape in shapes) and same_shape(*(s.values for s in shapes))
