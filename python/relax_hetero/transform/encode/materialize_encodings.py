"""MaterializeEncodings: turn encoded ops into calls of kernels on packed tensors.

Before::

    a = R.hetero.set_encoding(x, "matmul[0]<...>", layout="identity<2>")
    b = R.hetero.prepacked(weight, "768x3072", "matmul[1]<...>", layout="pack<outer=[1, 0] inner=[1:32]>")
    c = R.hetero.matmul(a, b, encoding="matmul[2]<...>", layout="identity<2>", kernel="matmul_128x768x3072_llvm_0")
    d = R.hetero.elementwise(c, bias, expression="relu(add(x0, x1))", ...)
    y = R.hetero.unset_encoding(d, "matmul[2]<...>", layout="identity<2>")

After::

    y = R.call_tir(cls.matmul_128x768x3072_llvm_0_add_relu, (x, weight, bias), out_ty=R.Tensor((128, 3072), ...))

`set_encoding` and `unset_encoding` become a kernel, a plain `permute_dims` if nothing is tiled (other passes can move
that), or nothing if the layout is the identity. A tensor that is unpacked only to be packed for another op is converted
directly. Types become those of the packed tensors. A chain of elementwise ops after a product, each the only user of
the one before, becomes the epilogue of its kernel: accumulators stay in registers for bias, activation and residual.
`R.hetero.rows` becomes a kernel, or, if it is the only reader of a product, a phase of that kernel (`epilogues`).
Products of many rows with experts share a call of a kernel that sorts the rows by expert, if theirs read that order.
Two products of the same few rows, one of which reads the other, are one kernel (`paired_products`).
Products whose results GPUs add send them (`shard.overlapped_sums`).

Assumes SpecializeEncodings. Kernels are written by the resolver of the device's target (products, elementwise) or by
`relax_hetero.tir.pack.pack`; equal problems on equal targets share one. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.row_program import RowProgram
from ...errors import EncodingError
from ...op.attention import ATTENTION
from ...op.cached_attention import CACHED_ATTENTION, PAGES
from ...op.encoded import PREPACKED, PRODUCTS, RELAYOUT, SET, UNSET, encoded_op
from ...op.quantized_matmul import BLOCK_MATMUL, BLOCK_ROWS
from ...op.rows import ROWS
from ...op.streamed import PANEL_FRAGMENTS
from ...target.vdevice import vdevices_of
from ..ir.declare import declare_pass
from ..ir.op_names import TRANSFER
from ..ir.rewriting import (
    map_bindings,
    op_name,
    relax_functions,
    typed,
    walk_bindings,
    walk_scopes,
    with_functions,
)
from ..shard.overlapped_sums import overlap_sums
from .encoded_values import Stored, StoredRows, physical_type
from .encoding_kernels import EncodingKernels
from .epilogues import Chain, find_row_phases, fused_variables, user_counts
from .kernel_problems import quantized_matmul_problem
from .paired_products import pair_products
from .replaced_bindings import Merges, error_context
from .verify_encodings import verify_encodings


def materialize_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    EncodingError
        When it runs: an op lacks a layout, or a resolver's kernel does not fit its problem.
    """
    verify_encodings(mod)
    kernels = EncodingKernels(mod, vdevices_of(mod))
    functions = {gv: _Materializer(gv.name_hint, kernels, func).materialize() for gv, func in relax_functions(mod)}
    functions = {gv: overlap_sums(pair_products(func, kernels), mod, kernels) for gv, func in functions.items()}
    return with_functions(mod, {**functions, **kernels.functions})


MaterializeEncodings = declare_pass("MaterializeEncodings", materialize_encodings)


class _Materializer:
    """Rewriter of one function."""

    def __init__(self, name: str, kernels: EncodingKernels, func: relax.Function) -> None:
        self.name = name
        self.kernels = kernels
        self.func = func
        self.fused = fused_variables(func)  # exist only inside kernels
        self.phases = find_row_phases(func, self.fused)
        self.fused |= self.phases.encoded
        self.relayouts = _find_relayouts(func)  # plain tensors that are only packed again
        self.chains: dict[relax.Var, Chain] = {}  # product and epilogue up to a fused variable
        self.stored: dict[relax.Var, Stored] = {}  # type and layout of packed tensors
        self.tuples = _vars_used_beyond_fields(func)  # used as a whole
        self.wider_tuples: dict[relax.Var, relax.Var] = {}  # replacement of a tuple, with scratch at its end
        self.fields: dict[relax.Var, tuple[relax.Var, ...]] = {}  # variables for the fields of a replaced tuple
        self.merges = Merges()
        self.scopes = {binding.var: i for i, scope in enumerate(walk_scopes(func)) for binding in scope}
        self.orders: dict[tuple[Any, ...], relax.Var] = {}  # sorted experts, by scope, index and kernel

    def materialize(self) -> relax.Function:
        return self.merges.apply(map_bindings(self.func, error_context(self._rewrite, self.name)))

    def _rewrite(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value = binding.value
        name = encoded_op(value)
        if name is not None:
            return self._rewrite_encoded(name, binding)
        if op_name(value) == ROWS:
            return self._rewrite_rows(binding)
        if op_name(value) == ATTENTION:
            return self._rewrite_attention(binding)
        if op_name(value) == CACHED_ATTENTION:
            return self._rewrite_cached_attention(binding)
        if op_name(value) in (BLOCK_MATMUL, BLOCK_ROWS, PANEL_FRAGMENTS):
            return self._rewrite_quantized_op(binding)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.wider_tuples:
            field = relax.TupleGetItem(self.wider_tuples[value.tuple_value], value.index)
            return relax.VarBinding(binding.var, field, binding.span)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.fields:
            return self.merges.alias(binding.var, self.fields[value.tuple_value][int(value.index)])
        if op_name(value) == TRANSFER and value.args[0] in self.stored:
            copy = Stored(binding.var.ty, self.stored[value.args[0]].layout)
            transfer = relax.op.to_vdevice(self.merges.resolve(value.args[0]), binding.var.ty.vdevice)
            return self._bind(binding, typed(transfer, physical_type(copy)), copy)
        return binding

    def _rewrite_encoded(self, name: str, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        var, call = binding.var, binding.value
        op_text = f"{name} of variable {var.name!r} in function {self.name!r}"
        if not call.attrs.layout:
            raise EncodingError(f"{op_text} lacks a layout; expected a module after SpecializeEncodings")
        layout = PackedLayout.parse(call.attrs.layout)
        stored = Stored(var.ty, layout)
        if name == PREPACKED:
            self.stored[var] = stored
            return self.merges.drop(var, call.args[0])
        if name == SET:
            return self._pack(binding, self._stored(call.args[0]), stored, op_text)
        if name == RELAYOUT:
            return self._pack(binding, Stored(var.ty, PackedLayout.parse(call.attrs.from_layout)), stored, op_text)
        if name == UNSET:
            if var in self.phases.plain:
                self.chains[var] = self.chains[call.args[0]]
                return []
            if layout.is_identity:
                return self.merges.alias(var, call.args[0])
            if var in self.relayouts:
                self.stored[var] = stored
                return self.merges.drop(var, call.args[0])
            return relax.VarBinding(var, self._relayout(call, stored, Stored.plain(var.ty), op_text), binding.span)
        if name in PRODUCTS:
            chain = Chain(call)
        elif call.args[0] in self.chains:
            chain = self.chains[call.args[0]].then(call)
        else:
            return self._rewrite_elementwise(binding, stored, op_text)
        if var in self.fused:
            self.chains[var] = chain
            return []
        return self._product_call(binding, chain, stored, op_text)

    def _pack(
        self, binding: relax.Binding, source: Stored, stored: Stored, op_text: str
    ) -> relax.Binding | list[relax.Binding]:
        if source.layout == stored.layout:
            self.stored[binding.var] = stored
            return self.merges.drop(binding.var, binding.value.args[0])
        return self._bind(binding, self._relayout(binding.value, source, stored, op_text), stored)

    def _relayout(self, call: relax.Call, source: Stored, stored: Stored, op_text: str) -> relax.Call:
        """Convert the operand of `call` to another layout, with a kernel or, if that is enough, a permutation."""
        axes = source.layout.permutation_to(stored.layout)
        if axes is None:
            kernel = self.kernels.relayout(source, stored, op_text)
            return self._call(kernel, call.args, physical_type(stored))
        permute = relax.op.permute_dims(self.merges.resolve(call.args[0]), list(axes))
        return typed(permute, physical_type(stored))

    def _product_call(
        self,
        binding: relax.Binding,
        chain: Chain,
        stored: Stored,
        op_text: str,
        rows: StoredRows | None = None,
        row_args: Sequence[relax.Expr] = (),
    ) -> relax.Binding:
        """Call of a product's kernel; with a row phase `rows`, `binding` is that of the row program."""
        encoding = Encoding.parse(chain.product.attrs.encoding)
        operands = [self._stored(arg) for arg in chain.product.args]
        expression = None if chain.expression == Expression.operand(0) else chain.expression
        epilogue_operands = [self._stored(arg) for arg in chain.epilogue_operands]
        name = str(chain.product.attrs.kernel)
        row_ops = str(binding.value.attrs.ops).split(",") if rows is not None else []
        kernel = self.kernels.product(
            encoding, operands, stored, expression, epilogue_operands, name, op_text, rows, row_ops
        )
        call = self._call(kernel, [*chain.product.args, *chain.epilogue_operands, *row_args], physical_type(stored))
        return self._bind(binding, call, stored)

    def _rewrite_elementwise(self, binding: relax.Binding, stored: Stored, op_text: str) -> relax.Binding:
        call = binding.value
        expression = Expression.parse(call.attrs.expression)
        kernel = self.kernels.elementwise(expression, [self._stored(arg) for arg in call.args], stored, op_text)
        return self._bind(binding, self._call(kernel, call.args, physical_type(stored)), stored)

    def _rewrite_rows(self, binding: relax.Binding) -> relax.Binding:
        var, call = binding.var, binding.value
        program = RowProgram.parse(call.attrs.program)
        op_text = f"{ROWS} of variable {var.name!r} in function {self.name!r}"
        product = self.phases.products.get(var)
        if product is not None:
            index = next(i for i, arg in enumerate(call.args) if arg.same_as(product))
            chain, args = self.chains[product], [arg for arg in call.args if not arg.same_as(product)]
            rows = StoredRows(program, index, tuple(map(self._stored, args)))
            return self._product_call(binding, chain, Stored.plain(var.ty), op_text, rows, args)
        operands = [self._stored(arg) for arg in call.args]
        kernel = self.kernels.rows(program, operands, Stored.plain(var.ty), str(call.attrs.ops), op_text)
        return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)

    def _rewrite_attention(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """Call of an attention kernel; a scratch tensor, if it needs one, is a second result, which nothing reads."""
        op_text = f"{ATTENTION} of variable {binding.var.name!r} in function {self.name!r}"
        kernel, scratch = self.kernels.attention(binding.value, binding.var.ty, op_text)
        var, call = binding.var, binding.value
        if scratch is None:
            return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)
        types = [var.ty, scratch]
        operands = relax.Tuple([self.merges.resolve(arg) for arg in call.args])
        value = typed(relax.call_tir(kernel, operands, types), tvm.ir.TupleType(types))
        results = type(var)(f"{var.name}_scratch", value.ty)
        output = relax.VarBinding(var, relax.TupleGetItem(results, 0), binding.span)
        return [relax.VarBinding(results, value, binding.span), output]

    def _rewrite_cached_attention(self, binding: relax.Binding) -> list[relax.Binding]:
        """Call of a kernel that appends to pages in place and attends to them; scratch, if any, is the last result."""
        var, call = binding.var, binding.value
        op_text = f"{CACHED_ATTENTION} of variable {var.name!r} in function {self.name!r}"
        out, pages = var.ty.fields
        append_kernel = self.kernels.append(call, out, op_text)
        if append_kernel is not None:
            return self._attention_after_append(binding, append_kernel, op_text)
        kernel, scratch = self.kernels.cached_attention(call, out, op_text)
        types = [out, pages] if scratch is None else [out, pages, scratch]
        operands = relax.Tuple([self.merges.resolve(arg) for arg in call.args])
        value = relax.call_tir_inplace(kernel, operands, [-1, PAGES, -1][: len(types)], types)
        value = typed(value, tvm.ir.TupleType(types))
        if scratch is None:
            return [relax.VarBinding(var, value, binding.span)]
        results = type(var)(f"{var.name}_scratch", value.ty)
        self.wider_tuples[var] = results
        # The tuple without scratch is only built if something uses it as a whole: it would split a command buffer.
        return [relax.VarBinding(results, value, binding.span), *self._original_tuple(binding, results)]

    def _attention_after_append(
        self, binding: relax.Binding, append_kernel: tvm.ir.GlobalVar, op_text: str
    ) -> list[relax.Binding]:
        """Calls of a kernel that appends to pages in place, and of one that attends to them."""
        var, call = binding.var, binding.value
        var_class, (out, pages) = type(var), var.ty.fields
        operands = [self.merges.resolve(arg) for arg in call.args]
        new_pages = var_class(f"{var.name}_pages", pages)
        write = typed(relax.call_tir_inplace(append_kernel, relax.Tuple(operands), [PAGES], [pages]), pages)
        operands[PAGES] = new_pages
        kernel, _ = self.kernels.cached_attention(call, out, op_text)
        rows = var_class(f"{var.name}_rows", out)
        value = typed(relax.call_tir(kernel, relax.Tuple(operands), out), out)
        self.fields[var] = (rows, new_pages)
        bindings = [relax.VarBinding(new_pages, write, binding.span), relax.VarBinding(rows, value, binding.span)]
        if var in self.tuples:
            bindings.append(relax.VarBinding(var, relax.Tuple([rows, new_pages]), binding.span))
        return bindings

    def _original_tuple(self, binding: relax.Binding, results: relax.Var) -> list[relax.Binding]:
        """Bindings that build the original tuple from the first fields of `results`, if it is used as a whole."""
        var, var_class = binding.var, type(binding.var)
        if var not in self.tuples:
            return []
        fields = [var_class(f"{var.name}_{index}", ty) for index, ty in enumerate(var.ty.fields)]
        items = [relax.VarBinding(field, relax.TupleGetItem(results, index)) for index, field in enumerate(fields)]
        return [*items, relax.VarBinding(var, relax.Tuple(fields), binding.span)]

    def _rewrite_quantized_op(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """Call of a kernel on quantized weights, after a call of one that dequantizes them, or that sorts experts."""
        var, call = binding.var, binding.value
        op_text = f"{op_name(call)} of variable {var.name!r} in function {self.name!r}"
        if op_name(call) != BLOCK_MATMUL:
            make = self.kernels.block_rows if op_name(call) == BLOCK_ROWS else self.kernels.panel_fragments
            kernel = make(call, var.ty, op_text)
            return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)
        problem = quantized_matmul_problem(call, var.ty)
        unpacked = self.kernels.unpacked_matmul(problem, var.ty, op_text)
        if unpacked is not None:
            dequantize_kernel, ty, matmul_kernel, num_weights = unpacked
            weights = type(var)(f"{var.name}_numbers", ty)
            lhs, args, extra_args = call.args[0], call.args[1 : 1 + num_weights], call.args[1 + num_weights :]
            dequantize = relax.VarBinding(weights, self._call(dequantize_kernel, args, ty), binding.span)
            product = self._call(matmul_kernel, [lhs, weights, *extra_args], var.ty)
            return [dequantize, relax.VarBinding(var, product, binding.span)]
        args, bindings = list(call.args), []
        sorted_product = self.kernels.expert_order(problem, var.ty, op_text)
        if sorted_product is not None:
            problem, sort_kernel, ty = sorted_product
            place = 1 + len(problem.weights)
            key = (self.scopes[var], args[place], sort_kernel)
            if key not in self.orders:
                # A plain variable, which further blocks of the scope can read.
                self.orders[key] = relax.Var(f"{var.name}_order", ty)
                sort = self._call(sort_kernel, [args[place]], ty)
                bindings.append(relax.VarBinding(self.orders[key], sort, binding.span))
            args[place] = self.orders[key]
        kernel = self.kernels.quantized_matmul(problem, var.ty, op_text)
        return [*bindings, relax.VarBinding(var, self._call(kernel, args, var.ty), binding.span)]

    def _stored(self, expr: relax.Expr) -> Stored:
        stored = self.stored.get(expr) if isinstance(expr, relax.Var) else None
        return stored or Stored.plain(expr.ty)

    def _call(self, kernel: tvm.ir.GlobalVar, args: Sequence[relax.Expr], ty: relax.TensorType) -> relax.Call:
        operands = relax.Tuple([self.merges.resolve(arg) for arg in args])
        return typed(relax.call_tir(kernel, operands, ty), ty)

    def _bind(self, binding: relax.Binding, value: relax.Call, stored: Stored) -> relax.Binding:
        """Bind `value` to a variable of the stored tensor's type, which replaces the original variable."""
        self.stored[binding.var] = stored
        ty = physical_type(stored)
        var = binding.var
        if not stored.layout.is_identity:
            var = type(var)(var.name, ty, var.span)
            self.merges.drop(binding.var, var)
        return relax.VarBinding(var, value, binding.span)


def _vars_used_beyond_fields(func: relax.Function) -> set[relax.Var]:
    """Variables that are used other than by access to a field."""
    counts = user_counts(func)
    for binding in walk_bindings(func):
        if isinstance(binding.value, relax.TupleGetItem) and isinstance(binding.value.tuple_value, relax.Var):
            counts[binding.value.tuple_value] -= 1
    return {var for var, count in counts.items() if count}


def _find_relayouts(func: relax.Function) -> set[relax.Var]:
    """Plain results of unset_encoding that only set_encoding reads: both together are a relayout."""
    unset: set[relax.Var] = set()
    counts = user_counts(func)
    for binding in walk_bindings(func):
        name, var = encoded_op(binding.value), binding.var
        # Only if both are dataflow variables or neither is, one can replace the other.
        if name == UNSET and isinstance(var, relax.DataflowVar) == isinstance(binding.value.args[0], relax.DataflowVar):
            unset.add(var)
        elif name == SET and binding.value.args[0] in unset:
            counts[binding.value.args[0]] -= 1
    return {var for var in unset if counts.get(var, 0) == 0}
