"""Pairs of products of the same rows, where one reads the other's result: one kernel computes both.

Before, of a gated feed-forward network::

    gate = R.call_tir(cls.matmul_32x14336x4096_f16f16_cuda_silu, (x, gate_weight), ...)
    both = R.call_tir(cls.matmul_32x14336x4096_f16f16_cuda_multiply_cast, (x, up_weight, gate), ...)

After::

    both = R.call_tir(cls.matmul_pair_32x14336x4096_f16f16_cuda_silu_multiply_cast, (x, up_weight, gate_weight), ...)

A decode step is bound by memory, and each launch costs the time from its begin to its first weights.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import relax

from ...encoding.expression import Expression
from ...encoding.problem import Epilogue, MatmulProblem
from ..ir.op_names import CALL_TIR
from ..ir.rewriting import map_bindings, op_name, typed, walk_scopes
from .encoding_kernels import EncodingKernels
from .epilogues import may_write, user_counts

_NUM_FACTORS = 2  # number of the first operand of an epilogue among those of a kernel


def pair_products(func: relax.Function, kernels: EncodingKernels) -> relax.Function:
    """Return a function whose products also compute another one of the same rows that only they read, if they can."""
    users = user_counts(func)
    changed: dict[relax.Var, relax.Expr] = {}
    removed: set[relax.Var] = set()
    for bindings in walk_scopes(func):
        products: dict[relax.Var, tuple[relax.Call, MatmulProblem]] = {}
        for binding in bindings:
            var, call = binding.var, binding.value
            if may_write(call):
                products.clear()
            problem = kernels.product_of(call.args[0]) if op_name(call) == CALL_TIR else None
            if problem is None:
                continue
            products[var] = call, problem
            for number, operand in enumerate(call.args[1].fields[_NUM_FACTORS:]):
                if operand not in products or users[operand] > 1 or operand in changed:
                    continue
                pair = _paired(*products[operand], call, problem, number, kernels)
                if pair is not None:
                    changed[var] = pair
                    removed.add(operand)
                    break

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        if binding.var in removed:
            return []
        if binding.var not in changed:
            return binding
        return relax.VarBinding(binding.var, changed[binding.var], binding.span)

    return map_bindings(func, change) if changed else func


def _paired(
    first: relax.Call,
    first_problem: MatmulProblem,
    call: relax.Call,
    problem: MatmulProblem,
    number: int,
    kernels: EncodingKernels,
) -> relax.Call | None:
    """A call of one kernel for `call` and the product that is operand `number` of its epilogue."""
    (lhs, weight, *others), (first_lhs, first_weight, *of_first) = (each.args[1].fields for each in (call, first))
    pair = _problem(problem, first_problem, number) if lhs.same_as(first_lhs) else None
    kernel = None if pair is None else kernels.pair(call.args[0], pair)
    if kernel is None:
        return None
    operands = [lhs, weight, first_weight, *of_first, *others[:number], *others[number + 1 :]]
    return typed(relax.op.call_tir(kernel, relax.Tuple(operands), call.ty), call.ty)


def _problem(problem: MatmulProblem, first: MatmulProblem, number: int) -> MatmulProblem | None:
    """A product that computes `first`, operand `number` of its epilogue, too; None if these differ in more."""
    epilogue, of_first = problem.epilogue, first.epilogue or Epilogue(Expression.operand(0))
    rest = replace(first, epilogue=None, result=problem.result)
    # Initial accumulators and operands of rows, which a pair lacks, would be among the operands.
    if epilogue is None or problem.init is not None or number >= len(epilogue.operands):
        return None
    if rest != replace(problem, epilogue=None) or epilogue.operands[number] != first.result:
        return None
    extents = [extent for each in (problem, first) for operand in each.parameters for extent in operand.shape]
    types = [first.acc_dtype, *(operand.dtype for operand in of_first.operands)]
    if not all(isinstance(extent, int) for extent in extents) or of_first.expression.dtype(types) != first.result.dtype:
        return None
    count = len(of_first.operands)
    inner = of_first.expression.substitute([Expression.operand(1 + i) for i in range(1 + count)])
    outer = [Expression.operand(2 + count + i - (i > number)) for i in range(len(epilogue.operands))]
    outer[number] = inner
    expression = epilogue.expression.substitute([Expression.operand(0), *outer])
    operands = [operand for i, operand in enumerate(epilogue.operands) if i != number]
    return replace(problem, second=first.rhs, epilogue=Epilogue(expression, (*of_first.operands, *operands)))
