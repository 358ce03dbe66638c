"""MaterializeEncodings: encoded ops become kernels on tensors as they are stored.

Before::

    a = R.hetero.set_encoding(x, "matmul[0]<...>", layout="identity<2>")
    b = R.hetero.prepacked(weight, "768x3072", "matmul[1]<...>", layout="pack<outer=[1, 0] inner=[1:32]>")
    c = R.hetero.matmul(a, b, encoding="matmul[2]<...>", layout="identity<2>", kernel="matmul_128x768x3072_llvm_0")
    d = R.hetero.elementwise(c, bias, expression="relu(add(x0, x1))", ...)
    y = R.hetero.unset_encoding(d, "matmul[2]<...>", layout="identity<2>")

After::

    y = R.call_tir(cls.matmul_128x768x3072_llvm_0_add_relu, (x, weight, bias), out_ty=R.Tensor((128, 3072), ...))

What lays tensors out becomes a kernel too, a plain `permute_dims` where nothing is tiled (other passes can move that),
and vanishes where the layout is identity; what was packed and is unpacked
only to be packed for another op goes from the one layout to the other. Types become those of the bytes.
Elementwise ops of which each is the only user of the one before, the first of a product's, become the epilogue of the
product's kernel: its accumulators never leave registers before bias, activation and residual are applied.
`R.hetero.rows` becomes a kernel too, or a phase of the kernel of the product whose result only it reads (`epilogues`).

Assumes SpecializeEncodings. Kernels are written by the resolver of the device's target (products, elementwise) or by
`relax_hetero.tir.pack.pack`; equal problems on equal targets share one. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from ...target.vdevice import vdevices_of
from ..ir.declare import declare_pass
from ..ir.op_names import TRANSFER
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, walk_bindings, with_functions
from .encoded_values import Stored, StoredRows, physical_type
from .encoding_kernels import EncodingKernels
from .epilogues import Chain, find_row_phases, fused_variables, user_counts
from .replaced_bindings import Merges, error_context
from .verify_encodings import verify_encodings


def materialize_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    EncodingError
        When it runs: an op has no layout yet, or a resolver's kernel does not fit its problem.
    """
    verify_encodings(mod)
    kernels = EncodingKernels(mod, vdevices_of(mod))
    functions = {gv: _Function(gv.name_hint, kernels, func).materialize() for gv, func in relax_functions(mod)}
    return with_functions(mod, {**functions, **kernels.functions})


MaterializeEncodings = declare_pass("MaterializeEncodings", materialize_encodings)


class _Function:
    """One function: what each encoded variable has become."""

    def __init__(self, name: str, kernels: EncodingKernels, func: relax.Function) -> None:
        self.name = name
        self.kernels = kernels
        self.func = func
        self.fused = fused_variables(func)
        self.phases = find_row_phases(func, self.fused)
        self.fused |= self.phases.encoded
        self.relaid = _relaid_variables(func)
        self.chains: dict[relax.Var, Chain] = {}
        self.stored: dict[relax.Var, Stored] = {}
        self.tuples = _tuples_used_whole(func)
        self.fields: dict[relax.Var, relax.Var] = {}  # tuples whose fields are now those of another
        self.parts: dict[relax.Var, tuple[relax.Var, ...]] = {}  # tuples whose fields are variables
        self.merges = Merges()

    def materialize(self) -> relax.Function:
        return self.merges.apply(map_bindings(self.func, error_context(self._change, self.name)))

    def _change(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value = binding.value
        name = encoded_op(value)
        if name is not None:
            return self._encoded(name, binding)
        if op_name(value) == ROWS:
            return self._rows(binding)
        if op_name(value) == ATTENTION:
            return self._attention(binding)
        if op_name(value) == CACHED_ATTENTION:
            return self._cached_attention(binding)
        if op_name(value) in (BLOCK_MATMUL, BLOCK_ROWS):
            return self._quantized_op(binding)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.fields:
            field = relax.TupleGetItem(self.fields[value.tuple_value], value.index)
            return relax.VarBinding(binding.var, field, binding.span)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.parts:
            return self.merges.alias(binding.var, self.parts[value.tuple_value][int(value.index)])
        if op_name(value) == TRANSFER and value.args[0] in self.stored:
            stored = self.stored[value.args[0]]
            there = Stored(binding.var.ty, stored.layout)
            moved = relax.op.to_vdevice(self.merges.resolve(value.args[0]), binding.var.ty.vdevice)
            return self._bind(binding, typed(moved, physical_type(there)), there)
        return binding

    def _encoded(self, name: str, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        var, call = binding.var, binding.value
        where = f"{name} of variable {var.name!r} in function {self.name!r}"
        if not call.attrs.layout:
            raise EncodingError(f"{where} has no layout; expected a module that SpecializeEncodings has been through")
        layout = PackedLayout.parse(call.attrs.layout)
        stored = Stored(var.ty, layout)
        if name == PREPACKED:
            self.stored[var] = stored
            return self.merges.drop(var, call.args[0])
        if name == SET:
            return self._laid_out(binding, self._stored(call.args[0]), stored, where)
        if name == RELAYOUT:
            return self._laid_out(binding, Stored(var.ty, PackedLayout.parse(call.attrs.from_layout)), stored, where)
        if name == UNSET:
            if var in self.phases.plain:
                self.chains[var] = self.chains[call.args[0]]
                return []
            if layout.is_identity:
                return self.merges.alias(var, call.args[0])
            if var in self.relaid:
                self.stored[var] = stored
                return self.merges.drop(var, call.args[0])
            return relax.VarBinding(var, self._relaid(call, stored, Stored.plain(var.ty), where), binding.span)
        if name in PRODUCTS:
            chain = Chain(call)
        elif call.args[0] in self.chains:
            chain = self.chains[call.args[0]].then(call)
        else:
            return self._elementwise(binding, stored, where)
        if var in self.fused:
            self.chains[var] = chain
            return []
        return self._product(binding, chain, stored, where)

    def _laid_out(
        self, binding: relax.Binding, source: Stored, stored: Stored, where: str
    ) -> relax.Binding | list[relax.Binding]:
        if source.layout == stored.layout:
            self.stored[binding.var] = stored
            return self.merges.drop(binding.var, binding.value.args[0])
        return self._bind(binding, self._relaid(binding.value, source, stored, where), stored)

    def _relaid(self, call: relax.Call, source: Stored, stored: Stored, where: str) -> relax.Call:
        """The operand of `call` from one layout to another: a kernel, or a plain permutation where that is all."""
        axes = source.layout.permutation_to(stored.layout)
        if axes is None:
            kernel = self.kernels.relayout(source, stored, where)
            return self._call(kernel, call.args, physical_type(stored))
        permute = relax.op.permute_dims(self.merges.resolve(call.args[0]), list(axes))
        return typed(permute, physical_type(stored))

    def _product(
        self,
        binding: relax.Binding,
        chain: Chain,
        stored: Stored,
        where: str,
        rows: StoredRows | None = None,
        row_args: Sequence[relax.Expr] = (),
    ) -> relax.Binding:
        """The call of a product's kernel; with `rows`, the binding is that of the work on its rows."""
        encoding = Encoding.parse(chain.product.attrs.encoding)
        operands = [self._stored(arg) for arg in chain.product.args]
        expression = None if chain.expression == Expression.operand(0) else chain.expression
        others = [self._stored(arg) for arg in chain.others]
        name = str(chain.product.attrs.kernel)
        row_ops = str(binding.value.attrs.ops).split(",") if rows is not None else []
        kernel = self.kernels.product(encoding, operands, stored, expression, others, name, where, rows, row_ops)
        call = self._call(kernel, [*chain.product.args, *chain.others, *row_args], physical_type(stored))
        return self._bind(binding, call, stored)

    def _elementwise(self, binding: relax.Binding, stored: Stored, where: str) -> relax.Binding:
        call = binding.value
        expression = Expression.parse(call.attrs.expression)
        kernel = self.kernels.elementwise(expression, [self._stored(arg) for arg in call.args], stored, where)
        return self._bind(binding, self._call(kernel, call.args, physical_type(stored)), stored)

    def _rows(self, binding: relax.Binding) -> relax.Binding:
        var, call = binding.var, binding.value
        program = RowProgram.parse(call.attrs.program)
        where = f"{ROWS} of variable {var.name!r} in function {self.name!r}"
        product = self.phases.products.get(var)
        if product is not None:
            number = next(i for i, arg in enumerate(call.args) if arg.same_as(product))
            chain, args = self.chains[product], [arg for arg in call.args if not arg.same_as(product)]
            rows = StoredRows(program, number, tuple(map(self._stored, args)))
            return self._product(binding, chain, Stored.plain(var.ty), where, rows, args)
        operands = [self._stored(arg) for arg in call.args]
        kernel = self.kernels.rows(program, operands, Stored.plain(var.ty), str(call.attrs.ops), where)
        return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)

    def _attention(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """The call of a kernel, whose scratch, if it wants any, is a second result that nobody reads."""
        where = f"{ATTENTION} of variable {binding.var.name!r} in function {self.name!r}"
        kernel, scratch = self.kernels.attention(binding.value, binding.var.ty, where)
        var, call = binding.var, binding.value
        if scratch is None:
            return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)
        types = [var.ty, scratch]
        operands = relax.Tuple([self.merges.resolve(arg) for arg in call.args])
        value = typed(relax.call_tir(kernel, operands, types), tvm.ir.TupleType(types))
        both = type(var)(f"{var.name}_scratch", value.ty)
        first = relax.VarBinding(var, relax.TupleGetItem(both, 0), binding.span)
        return [relax.VarBinding(both, value, binding.span), first]

    def _cached_attention(self, binding: relax.Binding) -> list[relax.Binding]:
        """The call of a kernel that writes its pages in place; scratch, if it wants any, is a further result."""
        var, call = binding.var, binding.value
        where = f"{CACHED_ATTENTION} of variable {var.name!r} in function {self.name!r}"
        out, pages = var.ty.fields
        append = self.kernels.append(call, out, where)
        if append is not None:
            return self._appended_attention(binding, append, where)
        kernel, scratch = self.kernels.cached_attention(call, out, where)
        types = [out, pages] if scratch is None else [out, pages, scratch]
        operands = relax.Tuple([self.merges.resolve(arg) for arg in call.args])
        places = [-1, PAGES, -1][: len(types)]
        value = relax.call_tir_inplace(kernel, operands, places, types)
        value = typed(value, tvm.ir.TupleType(types))
        if scratch is None:
            return [relax.VarBinding(var, value, binding.span)]
        whole = type(var)(f"{var.name}_scratch", value.ty)
        self.fields[var] = whole
        # Nobody but those that take a field of it reads most of such tuples; a tuple of fields would end runs.
        return [relax.VarBinding(whole, value, binding.span), *self._tuple(binding, whole)]

    def _appended_attention(self, binding: relax.Binding, append: tvm.ir.GlobalVar, where: str) -> list[relax.Binding]:
        """The call of a kernel that writes pages in place, and of one that reads them."""
        var, call = binding.var, binding.value
        kind, (out, pages) = type(var), var.ty.fields
        operands = [self.merges.resolve(arg) for arg in call.args]
        written = kind(f"{var.name}_pages", pages)
        new = typed(relax.call_tir_inplace(append, relax.Tuple(operands), [PAGES], [pages]), pages)
        operands[PAGES] = written
        kernel, _ = self.kernels.cached_attention(call, out, where)
        attended = kind(f"{var.name}_rows", out)
        value = typed(relax.call_tir(kernel, relax.Tuple(operands), out), out)
        self.parts[var] = (attended, written)
        made = [relax.VarBinding(written, new, binding.span), relax.VarBinding(attended, value, binding.span)]
        if var in self.tuples:
            made.append(relax.VarBinding(var, relax.Tuple([attended, written]), binding.span))
        return made

    def _tuple(self, binding: relax.Binding, whole: relax.Var) -> list[relax.Binding]:
        """The first fields of `whole` as the tuple that the binding was, where it is used as a tuple."""
        var, kind = binding.var, type(binding.var)
        if var not in self.tuples:
            return []
        parts = [kind(f"{var.name}_{index}", ty) for index, ty in enumerate(var.ty.fields)]
        bound = [relax.VarBinding(part, relax.TupleGetItem(whole, index)) for index, part in enumerate(parts)]
        return [*bound, relax.VarBinding(var, relax.Tuple(parts), binding.span)]

    def _quantized_op(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """The call of a kernel on the weights' bits, or of one that unpacks them, and of a product."""
        var, call = binding.var, binding.value
        where = f"{op_name(call)} of variable {var.name!r} in function {self.name!r}"
        is_product = op_name(call) == BLOCK_MATMUL
        parts = self.kernels.unpacked_matmul(call, var.ty, where) if is_product else None
        if parts is not None:
            unpack, ty, multiply, count = parts
            numbers = type(var)(f"{var.name}_numbers", ty)
            made = relax.VarBinding(numbers, self._call(unpack, call.args[1 : 1 + count], ty), binding.span)
            product = self._call(multiply, [call.args[0], numbers, *call.args[1 + count :]], var.ty)
            return [made, relax.VarBinding(var, product, binding.span)]
        write = self.kernels.quantized_matmul if is_product else self.kernels.block_rows
        kernel = write(call, var.ty, where)
        return relax.VarBinding(var, self._call(kernel, call.args, var.ty), binding.span)

    def _stored(self, expr: relax.Expr) -> Stored:
        known = self.stored.get(expr) if isinstance(expr, relax.Var) else None
        return known or Stored.plain(expr.ty)

    def _call(self, kernel: tvm.ir.GlobalVar, args: Sequence[relax.Expr], ty: relax.TensorType) -> relax.Call:
        operands = relax.Tuple([self.merges.resolve(arg) for arg in args])
        return typed(relax.call_tir(kernel, operands, ty), ty)

    def _bind(self, binding: relax.Binding, value: relax.Call, stored: Stored) -> relax.Binding:
        """`value` bound to a variable of the stored tensor's type; the old one stands for it from now on."""
        self.stored[binding.var] = stored
        ty = physical_type(stored)
        var = binding.var
        if not stored.layout.is_identity:
            var = type(var)(var.name, ty, var.span)
            self.merges.drop(binding.var, var)
        return relax.VarBinding(var, value, binding.span)


def _tuples_used_whole(func: relax.Function) -> set[relax.Var]:
    """The variables that anything but the taking of a field uses."""
    left = user_counts(func)
    for binding in walk_bindings(func):
        if isinstance(binding.value, relax.TupleGetItem) and isinstance(binding.value.tuple_value, relax.Var):
            left[binding.value.tuple_value] -= 1
    return {var for var, count in left.items() if count}


def _relaid_variables(func: relax.Function) -> set[relax.Var]:
    """Plain tensors that only set_encoding reads, and that an unset_encoding made."""
    unset: set[relax.Var] = set()
    left = user_counts(func)
    for binding in walk_bindings(func):
        name, var = encoded_op(binding.value), binding.var
        if name == UNSET and isinstance(var, relax.DataflowVar) == isinstance(binding.value.args[0], relax.DataflowVar):
            unset.add(var)
        elif name == SET and binding.value.args[0] in unset:
            left[binding.value.args[0]] -= 1
    return {var for var in unset if left.get(var, 0) == 0}
