"""Conversion of an exported program (an FX graph) to Relax bindings; each binding remembers its node and module."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from ...errors import FrontendError
from ...op.require import MET, requirement
from ...transform.ir.reasons import reason
from ...vm.device.tensors import ALIGNMENT
from ..import_limits import Budget, ImportLimits, spending
from ..joined_sizes import JoinedSizes, joining_sizes
from ..onnx.control_flow.subgraphs import ImportedLoop
from ..onnx.importer import ImportedGraph
from ..onnx.node_names import NodeInfo, variable_name
from ..onnx.owned_bindings import OwnedBindings
from ..ops.node import const
from ..ops.required_sizes import equal, renamed
from . import ops  # noqa: F401 - registers the converters
from .complex_values import Complex, convert_complex, converts_complex, has_complex, is_complex, part_of
from .exporting import NodeNames, op_name, output_names, torch_package, unreadable_reason
from .sizes import Sizes, as_shape
from .torch_node import TABLE, Converter, TorchNode, dtype_name

if TYPE_CHECKING:
    import torch


class Folding:
    """Constant folding by torch: the nodes of a program's graph that depend on weights and numbers only.

    `graph`: graph of an exported program, functional and without random numbers; `weights`: placeholder name -> tensor
    of a parameter, buffer or constant.
    """

    def __init__(self, graph: Any, weights: Mapping[str, Any]) -> None:
        self._values = {node: weights[node.name] for node in graph.nodes if node.name in weights}
        self._constant_nodes = set(self._values)
        for node in graph.nodes:
            if node.op == "call_function" and self._constant_nodes.issuperset(node.all_input_nodes):
                if hasattr(node.target, "_schema") or node.target is operator.getitem:
                    self._constant_nodes.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self._constant_nodes

    def value(self, node: Any) -> Any:
        """The tensor or tensors that torch computes for a node."""
        torch, pending = torch_package(), [node]
        while pending:  # not recursive: a chain may exceed Python's stack
            operands = [operand for operand in pending[-1].all_input_nodes if operand not in self._values]
            if operands and pending[-1] not in self._values:
                pending += operands
                continue
            current = pending.pop()
            if current not in self._values:
                args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), self._values.__getitem__)
                with torch.no_grad():
                    self._values[current] = current.target(*args, **kwargs)
        return self._values[node]


# Sympy function -> op on float64 scalars.
_FLOAT_OPS: dict[str, Any] = {
    "Add": relax.op.add,
    "Mul": relax.op.multiply,
    "Pow": relax.op.power,
    "FloatPow": relax.op.power,
    "PowByNatural": relax.op.power,
    "IntTrueDiv": relax.op.divide,
    "FloatTrueDiv": relax.op.divide,
    "Max": relax.op.maximum,
    "Min": relax.op.minimum,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Abs": relax.op.abs,
    "OpaqueUnaryFn_sqrt": relax.op.sqrt,
    "OpaqueUnaryFn_exp": relax.op.exp,
    "OpaqueUnaryFn_log": relax.op.log,
    "OpaqueUnaryFn_cos": relax.op.cos,
    "OpaqueUnaryFn_sin": relax.op.sin,
    "OpaqueUnaryFn_tanh": relax.op.tanh,
}


def float_scalar(node: TorchNode, value: Any) -> relax.Expr:
    """Convert a float that a program computes from sizes and from numbers that it reads, as a float64 scalar.

    Raises FrontendError if a function in it has no op.
    """
    kind = type(value).__name__
    if value.is_Symbol and str(value) in node.sizes.read:
        return node.cast(node.sizes.read[str(value)][1], "float64")
    if value.is_Integer or value.is_Symbol:
        return node.cast(node.number(node.sizes.expr(value)), "float64")
    if value.is_number:
        return const(float(value), "float64")
    if kind not in _FLOAT_OPS:
        raise node.refusal(f"the number {value} is computed by {kind}, which cannot be imported")
    operands = [float_scalar(node, part) for part in value.args]
    if len(operands) == 1:
        return node.emit(_FLOAT_OPS[kind](*operands))
    return reduce(lambda a, b: node.emit(_FLOAT_OPS[kind](a, b)), operands)


# Assertions for torch's shape inference; the inferred sizes are in the results.
_IGNORED_OPS = frozenset(
    "sym_constrain_range_for_size sym_constrain_range _assert_tensor_metadata _assert_async "
    "_functional_assert_async _functional_sym_constrain_range _functional_sym_constrain_range_for_size".split()
)


def import_program(
    program: torch.export.ExportedProgram, names: Mapping[str, str], limits: ImportLimits | None
) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
    """Convert an exported program.

    `names`: symbol of torch -> name of the size. Returns the graph, its nodes, and the names of its outputs. Raises
    FrontendError if an op cannot be converted; the text has its name, its module and the reason.
    """
    nbytes = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    with joining_sizes(JoinedSizes()), spending(Budget(limits or ImportLimits(), nbytes)):
        return _Importer(program, Sizes(names, program.range_constraints)).run()


class _Importer(OwnedBindings):
    """Importer of a program's graph and nested graphs; converters see it as `Walk`."""

    def __init__(self, program: Any, sizes: Sizes) -> None:
        self._torch = torch_package()
        self._program = program
        self._sizes = sizes
        self._fold_weights = _fold_weights(program)
        self._names = NodeNames()
        self.bb = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}
        self._owners: dict[relax.Var, NodeInfo] = {}
        self._results: dict[NodeInfo, list[relax.Var]] = {}
        self._constants: dict[tuple[Any, ...], Any] = {}
        self._dense_copies: dict[str, Any] = {}  # alive because their addresses are keys of `_constants`
        self.loops: list[ImportedLoop] = []
        self.constant_bindings: dict[relax.Var, relax.Binding] = {}

    def run(self) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
        check_supported(self._program, self._fold_weights)
        params = self._inputs()
        self.bb.begin_scope(list(params.values()))
        try:
            with self._collect_bindings() as bindings:
                self._require_ranges()
                self._convert_all(self._program.graph_module)
                outputs, names = self._outputs()
        finally:
            self.bb.end_scope()
        nodes = list(dict.fromkeys(self._owners.values()))
        graph = ImportedGraph(
            self.bb.get(), list(params), list(params.values()), bindings, outputs, self._owners, self._results, {},
            self.loops,
        )  # fmt: skip
        return graph, nodes, names

    @contextmanager
    def _owned_bindings(self, info: NodeInfo) -> Iterator[None]:
        """Emit the bindings made inside as owned by `info` unless an inner node owns them."""
        with self._collect_bindings() as bindings:
            yield
        self.adopt(bindings, info)

    def as_tensor(self, value: Any) -> Any:
        """Convert a number or a size to a scalar tensor; other values are unchanged."""
        is_number = isinstance(value, (bool, int, float)) or tvm.ir.is_prim_expr(value)
        return self._detached_node("value").number(value) if is_number else value

    def graph_of(self, module: Any, arguments: Sequence[Any]) -> list[Any]:
        """Convert a nested graph at the builder's position and return its results."""
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        with self._sizes.scope():
            for placeholder, value in zip(placeholders, arguments, strict=True):
                self._bind_input(placeholder, value)
            self._convert_all(module)
            (output,) = (node for node in module.graph.nodes if node.op == "output")
            results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
            return [self._value(value) for value in results]

    def _bind_input(self, placeholder: Any, value: Any) -> None:
        """Bind an input of a nested graph and the symbols in its shape."""
        fake = placeholder.meta.get("val")
        node = self._detached_node(placeholder.name)
        if isinstance(fake, self._torch.SymInt):
            value = value if isinstance(value, int) or tvm.ir.is_prim_expr(value) else node.read_size(value)
            self._sizes.bind(fake, value)
        elif isinstance(fake, self._torch.Tensor) and isinstance(value, relax.Expr):
            for size, dim in zip(fake.shape, node.dims(value), strict=True):
                self._sizes.bind(size, dim)
        self._values[placeholder] = value

    def _detached_node(self, name: str) -> TorchNode:
        """A `TorchNode` for values that do not belong to an op."""
        return TorchNode("value.", NodeInfo(name, (), "value", "", ""), None, (), self, self._sizes)

    def _convert_all(self, module: Any) -> None:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                is_tensor = isinstance(value, self._torch.Tensor)
                self._values[node] = self._constant(value, str(node.target)) if is_tensor else value
            elif node.op == "call_function":
                self._convert(node)

    def _inputs(self) -> dict[str, relax.Var]:
        """Create the parameters of the function, by name; weights, buffers and constants become constants."""
        kinds = self._torch.export.graph_signature.InputKind
        placeholders = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        params: dict[str, relax.Var] = {}
        for spec in self._program.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            value = node.meta.get("val")
            is_tensor = isinstance(value, self._torch.Tensor)
            if is_tensor and spec.kind is kinds.USER_INPUT and value.dtype.is_complex:
                raise FrontendError(
                    f"the input {node.name!r} is of {value.dtype}, expected its view as real numbers, x.view_as_real()"
                )
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                if node.users:
                    self._values[node] = self._constant(self._fold_weights.value(node), spec.target)
            elif spec.kind is kinds.USER_INPUT and is_tensor:
                for dim in value.shape:
                    if not isinstance(dim, int):
                        self._sizes.symbols.update(map(str, dim.node.expr.free_symbols))
                dtype = dtype_name(value.dtype, f"the input {node.name!r}")
                ty = relax.TensorType(as_shape(self._sizes.shape(value.shape)), dtype)
                params[node.name] = relax.Var(variable_name(node.name), ty)
                self._values[node] = params[node.name]
            elif spec.kind is kinds.USER_INPUT and (value is None or isinstance(value, (bool, int, float, str))):
                self._values[node] = value
            else:
                raise FrontendError(
                    f"the input {node.name!r} of the exported program is a {type(value).__name__}, expected a tensor"
                )
        return params

    def _constant(self, tensor: Any, name: str) -> Any:
        """Convert a weight once, without a copy of torch's memory if kernels can read it."""
        torch = self._torch
        kind = unreadable_reason(tensor)
        if kind:
            raise FrontendError(f"the weight {name!r} is a {kind}, expected a dense tensor")
        tensor = tensor.detach()
        if tensor.dtype.is_complex:
            return Complex(*(self._constant(part.contiguous(), name) for part in (tensor.real, tensor.imag)))
        dtype_name(tensor.dtype, f"the weight {name!r}")
        if tensor.layout != torch.strided:
            tensor = self._dense_copies[name] = tensor.to_dense()
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.is_neg())
        if key in self._constants:
            return self._constants[key]
        dense = tensor.cpu().contiguous().resolve_neg()
        if dense.numel() and dense.data_ptr() % ALIGNMENT:
            dense = dense.clone()
        if dense.dtype == torch.bool or dense.numel() == 0 or dense.data_ptr() % ALIGNMENT:
            value = relax.const(tvm.runtime.tensor(dense.numpy()))
        else:
            value = relax.const(tvm.runtime.from_dlpack(dense))
        if tensor.numel():
            self._constants[key] = value
        return value

    def _require_ranges(self) -> None:
        with self._owned_bindings(NodeInfo("sizes", (), "require", "", "")):
            for condition, text in self._sizes.ranges(self._program.range_constraints):
                self.bb.match_cast(requirement(condition, f"the exported program: {text}"), MET)

    def _convert(self, node: Any) -> None:
        """Convert a node, which owns the emitted bindings."""
        if node.target is operator.getitem:
            container, index = node.args
            self._values[node] = self._values[container][index]
            return
        value = node.meta.get("val")
        if _is_number(value) and not _is_read_at_run_time(node):
            return  # computed by its readers
        if op_name(node) in _IGNORED_OPS or self._is_unknown_assertion(node):
            return
        info = self._names.info(node)
        try:
            with self._owned_bindings(info):
                result = self._convert_op(node, info)
        except FrontendError:
            raise
        except Exception as error:
            raise FrontendError(f"node {info} cannot be imported: {type(error).__name__}: {reason(error)}") from error
        self._values[node] = result
        results = result if isinstance(result, list) else [result]
        self._results[info] = [part for part in results if isinstance(part, relax.Var)]

    def _is_unknown_assertion(self, node: Any) -> bool:
        """Return whether a node asserts a condition over unknown symbols."""
        if op_name(node) not in ("_assert_scalar", "_functional_assert_scalar"):
            return False
        value = node.args[0].meta.get("val") if isinstance(node.args[0], self._torch.fx.Node) else None
        return isinstance(value, self._torch.SymBool) and self._sizes.condition(value) is None

    def _convert_op(self, node: Any, info: NodeInfo) -> Any:
        value, convert = node.meta.get("val"), _converter_of(node)
        if convert is None:
            folded = self._fold_weights.value(node)
            if isinstance(folded, (list, tuple)):
                return [self._constant(part, f"{info.name}[{index}]") for index, part in enumerate(folded)]
            return self._constant(folded, info.name)
        arguments, tensors = self._arguments(node)
        used_results = frozenset(user.args[1] for user in node.users if user.target is operator.getitem)
        torch_node = TorchNode(_full_name(node), info, value, tensors, self, self._sizes, used_results)
        if is_complex(value) or has_complex(arguments):
            convert = convert_complex
        elif node.args and self._is_empty(value):  # for any op; some kernels fail for sizes of 0
            convert = _empty
        result = convert(torch_node, *arguments)
        if isinstance(value, (list, tuple)):
            parts = [
                None if part is None else self._check_result(torch_node, part, fake)
                for part, fake in zip(result, value, strict=False)
            ]
            return parts + [None] * (len(value) - len(parts))
        return self._check_result(torch_node, result, value)

    def _is_empty(self, fake: Any) -> bool:
        """Return whether a fake tensor, or every one in a list, has no elements."""
        if isinstance(fake, (list, tuple)):
            return bool(fake) and all(map(self._is_empty, fake))
        return isinstance(fake, self._torch.Tensor) and any(isinstance(dim, int) and dim == 0 for dim in fake.shape)

    def _check_result(self, node: TorchNode, result: Any, fake: Any) -> Any:
        """Check a result against the type that torch inferred, and use torch's symbols for its sizes."""
        if isinstance(result, Complex):
            return Complex(*(self._check_result(node, part, part_of(fake)) for part in result))
        if result is None or not hasattr(fake, "shape"):
            return self._bind_number(node, result, fake)
        result = node.emit(self.bb.normalize(result))
        ty = result.ty
        dims = self._sizes.shape(fake.shape)
        if str(ty.dtype) != dtype_name(fake.dtype) or int(ty.ndim) not in (-1, len(dims)):
            raise node.refusal(f"becomes {ty}, where torch infers {dtype_name(fake.dtype)} of shape {dims}")
        new = {str(symbol) for dim in fake.shape if not isinstance(dim, int) for symbol in dim.node.expr.free_symbols}
        if not isinstance(ty.shape, relax.ShapeExpr) or new - self._sizes.symbols:
            self._sizes.symbols |= new
            return self.bb.match_cast(result, relax.TensorType(as_shape(dims), str(ty.dtype)))
        for size, expected_size in zip(node.dims(result), dims, strict=True):
            if not node.sizes_equal(size, expected_size):
                text = f"has a size of {size}, where torch infers {expected_size}"
                node.onnx_node("Reshape", []).require(equal(size, expected_size), text)
        return renamed(node.onnx_node("Reshape", []), result, dims)

    def _bind_number(self, node: TorchNode, result: Any, fake: Any) -> Any:
        """Bind the symbol of a number that an op reads from a tensor, and return the number."""
        if not isinstance(result, relax.Expr) or tvm.ir.is_prim_expr(result):
            return result
        symbol = str(getattr(getattr(fake, "node", None), "expr", ""))
        scalar = node.reshape(result, [])
        if isinstance(fake, self._torch.SymInt) and symbol.isidentifier():
            size = node.read_size(scalar)
            self._sizes.bind(fake, size)
            self._sizes.read[symbol] = (size, scalar)
            self._require_range(node, fake.node.expr, size)
            return size
        if isinstance(fake, self._torch.SymFloat) and symbol.isidentifier():
            self._sizes.read[symbol] = (None, scalar)
        return scalar

    def _require_range(self, node: TorchNode, symbol: Any, size: Any) -> None:
        """Require the range that torch assumes for a number read from a tensor."""
        bounds = self._program.range_constraints.get(symbol)
        if bounds is not None and not isinstance(size, int):
            for condition, text in self._sizes.within(size, bounds):
                node.onnx_node("Identity", []).require(condition, f"reads a number that {text}")

    def _arguments(self, node: Any) -> tuple[list[Any], list[Any]]:
        """The values of a node's arguments and their fake tensors, in the order of the op's schema."""
        values, fakes = [], []
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # an op with nested graphs
            return [self._value(operand) for operand in node.args], list(node.args)
        for index, argument in enumerate(schema.arguments):
            if index < len(node.args):
                operand = node.args[index]
            elif argument.name in node.kwargs:
                operand = node.kwargs[argument.name]
            else:
                operand = argument.default_value
            values.append(self._value(operand))
            fakes.append(operand.meta.get("val") if isinstance(operand, self._torch.fx.Node) else operand)
        return values, fakes

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, self._torch.fx.Node):
            return self._values[argument] if argument in self._values else self._number(argument)
        if isinstance(argument, (list, tuple)):
            return [self._value(part) for part in argument]
        return argument

    def _number(self, node: Any) -> Any:
        """Convert a number that torch computes from sizes or from numbers that the model reads."""
        torch, value = self._torch, node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._sizes.dim(value)
        if isinstance(value, torch.SymBool):
            condition = self._sizes.condition(value)
            if condition is not None:
                return condition
        elif isinstance(value, torch.SymFloat):
            return float_scalar(self._detached_node(node.name), value.node.expr)
        elif value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise FrontendError(f"the value of {node} ({node.target}) cannot be imported: it is not a tensor or size")

    def _outputs(self) -> tuple[list[relax.Expr], list[str]]:
        """The module's results, followed by the new values of inputs that it mutates."""
        (node,) = (node for node in self._program.graph.nodes if node.op == "output")
        kinds = self._torch.export.graph_signature.OutputKind
        names = iter(output_names(self._program))
        results: dict[str, Any] = {}
        mutations: dict[str, Any] = {}
        for spec, argument in zip(self._program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind is kinds.USER_INPUT_MUTATION:
                mutations[str(spec.target)] = self._value(argument)
            elif spec.kind is kinds.USER_OUTPUT:
                results[next(names, f"output_{len(results)}")] = self._value(argument)
        outputs = {
            name: self._output(name, value)
            for name, value in (*results.items(), *((f"{name}_out", value) for name, value in mutations.items()))
            if value is not None and not isinstance(value, str)
        }
        if not outputs:
            raise FrontendError("the module returns no tensor")
        return list(outputs.values()), list(outputs)

    def _output(self, name: str, value: Any) -> relax.Expr:
        if isinstance(value, Complex):
            raise FrontendError(
                f"the output {name!r} is of complex numbers, expected their view as real ones, torch.view_as_real(x)"
            )
        if isinstance(value, relax.Expr) and not tvm.ir.is_prim_expr(value):
            return value
        dtype = "bool" if isinstance(value, bool) else "float32" if isinstance(value, float) else "int64"
        info = NodeInfo(variable_name(name), (), "output", "", "")
        with self._owned_bindings(info):
            return TorchNode("output.", info, None, (), self, self._sizes).tensor(value, dtype)


def _empty(node: TorchNode, *_: Any) -> Any:
    """Results without elements."""
    if isinstance(node.value, (list, tuple)):
        return [node.of(fake).filled(0) for fake in node.value]
    return node.filled(0)


def _full_name(node: Any) -> str:
    """Name of an op with its overload."""
    return f"{op_name(node)}.{getattr(node.target, '_overloadname', 'default')}"


def _converter_of(node: Any) -> Converter | None:
    op = op_name(node)
    return TABLE.get(_full_name(node)) or TABLE.get(op) or (convert_complex if converts_complex(op) else None)


def _is_read_at_run_time(node: Any) -> bool:
    """Return whether a number is read from a tensor at run time."""
    return op_name(node) in ("_local_scalar_dense", "item")


def _is_number(value: Any) -> bool:
    torch = torch_package()
    return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, bool, int, float))


def _fold_weights(program: Any) -> Folding:
    """Set up constant folding of a program."""
    tables = {**program.constants, **program.state_dict}
    weights = {
        spec.arg.name: tables[spec.target] for spec in program.graph_signature.input_specs if spec.target in tables
    }
    return Folding(program.graph, weights)


def check_supported(program: Any, folding: Folding) -> None:
    """Refuse a program that mutates buffers or has unsupported ops; the error lists all of them."""
    kinds = torch_package().export.graph_signature.OutputKind
    mutations = (kinds.BUFFER_MUTATION, getattr(kinds, "PARAMETER_MUTATION", None))
    changed = [spec.target for spec in program.graph_signature.output_specs if spec.kind in mutations]
    if changed:
        raise FrontendError(
            f"the module changes {', '.join(map(repr, changed))} when it runs, which a compiled model cannot; "
            "call module.eval() before, or return the new value instead"
        )
    missing = _unsupported_nodes(program.graph_module, NodeNames(), folding)
    if missing:
        raise FrontendError(f"the exported program has ops that cannot be imported: {'; '.join(missing)}")


def _unsupported_nodes(module: Any, names: NodeNames, folding: Folding) -> list[str]:
    """The unsupported nodes of a graph and of nested graphs."""
    titles = []
    for node in module.graph.nodes:
        op = op_name(node)
        if node.op == "get_attr":
            inner = operator.attrgetter(str(node.target))(module)
            titles += _unsupported_nodes(inner, names, folding) if hasattr(inner, "graph") else []
        elif node.op in ("call_module", "call_method"):
            titles.append(f"node {node.name!r}: {node.target}")
        elif node.op == "call_function" and node.target is not operator.getitem:
            is_size = _is_number(node.meta.get("val")) and not _is_read_at_run_time(node)
            if not (is_size or op in _IGNORED_OPS or _converter_of(node) is not None or node in folding):
                titles.append(f"node {names.info(node).name!r}: {node.target}")
    return titles
