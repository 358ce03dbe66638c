"""The walk over the nodes of an exported program: from FX to Relax bindings that know their modules."""

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
from .exporting import NodeNames, output_names, torch_package, unreadable_reason
from .node import TABLE, Converter, TorchNode, dtype_name
from .sizes import Sizes, as_shape

if TYPE_CHECKING:
    import torch


# Constant folding: torch computes values that depend on weights and numbers alone when a program is imported.


class Folding:
    """The nodes of a program's graph that depend on no input.

    Parameters
    ----------
    graph : object
        Graph of an exported program, functional and without random numbers.
    weights : mapping of str to object
        Placeholder name -> tensor of a parameter, buffer or constant.
    """

    def __init__(self, graph: Any, weights: Mapping[str, Any]) -> None:
        self._values = {node: weights[node.name] for node in graph.nodes if node.name in weights}
        self._fixed = set(self._values)
        for node in graph.nodes:
            if node.op == "call_function" and self._fixed.issuperset(node.all_input_nodes):
                if hasattr(node.target, "_schema") or node.target is operator.getitem:
                    self._fixed.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self._fixed

    def value(self, node: Any) -> Any:
        """The tensor, or several, that torch computes for a node."""
        torch, pending = torch_package(), [node]
        while pending:  # a chain may be longer than Python's stack is deep
            missing = [before for before in pending[-1].all_input_nodes if before not in self._values]
            if missing and pending[-1] not in self._values:
                pending += missing
                continue
            last = pending.pop()
            if last not in self._values:
                args, kwargs = torch.fx.node.map_arg((last.args, last.kwargs), self._values.__getitem__)
                with torch.no_grad():
                    self._values[last] = last.target(*args, **kwargs)
        return self._values[node]


# Floats that a program computes from sizes, and from numbers that it reads: scalars of float64.

_OPERATIONS: dict[str, Any] = {
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
    """Sympy's arithmetic as ops.

    Raises
    ------
    FrontendError
        If there is no op for a part of it.
    """
    kind = type(value).__name__
    if value.is_Symbol and str(value) in node.sizes.read:
        return node.cast(node.sizes.read[str(value)][1], "float64")
    if value.is_Integer or value.is_Symbol:
        return node.cast(node.number(node.sizes.expr(value)), "float64")
    if value.is_number:
        return const(float(value), "float64")
    if kind not in _OPERATIONS:
        raise node.refusal(f"the number {value} is computed by {kind}, which cannot be imported")
    operands = [float_scalar(node, part) for part in value.args]
    if len(operands) == 1:
        return node.emit(_OPERATIONS[kind](*operands))
    return reduce(lambda a, b: node.emit(_OPERATIONS[kind](a, b)), operands)


# Nodes that say something about sizes to torch alone: the sizes are in the results already.
_SILENT = frozenset(
    "sym_constrain_range_for_size sym_constrain_range _assert_tensor_metadata _assert_async "
    "_functional_assert_async _functional_sym_constrain_range _functional_sym_constrain_range_for_size".split()
)


def import_program(
    program: torch.export.ExportedProgram, names: Mapping[str, str], limits: ImportLimits | None
) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
    """Convert an exported program.

    Parameters
    ----------
    names : mapping of str to str
        Symbol of torch -> name of the size.

    Returns
    -------
    (ImportedGraph, list of NodeInfo, list of str)
        The graph, its nodes, and the names of its outputs.

    Raises
    ------
    FrontendError
        If an op cannot be converted; names it, its module and the reason.
    """
    nbytes = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    with joining_sizes(JoinedSizes()), spending(Budget(limits or ImportLimits(), nbytes)):
        return _Importer(program, Sizes(names, program.range_constraints)).run()


class _Importer(OwnedBindings):
    """The walk over a program's graph and the graphs inside its nodes, as the converters see it (`Walk`)."""

    def __init__(self, program: Any, sizes: Sizes) -> None:
        self._torch = torch_package()
        self._program = program
        self._sizes = sizes
        self._folding = _folding(program)
        self._names = NodeNames()
        self.bb = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}
        self._owners: dict[relax.Var, NodeInfo] = {}
        self._results: dict[NodeInfo, list[relax.Var]] = {}
        self._constants: dict[tuple[Any, ...], Any] = {}
        self._densified: dict[str, Any] = {}  # kept alive: their addresses are keys of `_constants`
        self.loops: list[ImportedLoop] = []
        self.known: dict[relax.Var, relax.Binding] = {}

    def run(self) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
        check_supported(self._program, self._folding)
        params = self._inputs()
        self.bb.begin_scope(list(params.values()))
        try:
            with self._collected() as bindings:
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
    def _owned(self, info: NodeInfo) -> Iterator[None]:
        """Bindings that are made inside belong to this node, unless to a node inside it."""
        with self._collected() as bindings:
            yield
        self.adopt(bindings, info)

    def as_tensor(self, value: Any) -> Any:
        """A number or a size as a scalar tensor; other values as they are."""
        is_number = isinstance(value, (bool, int, float)) or tvm.ir.is_prim_expr(value)
        return self._outside("value").number(value) if is_number else value

    def graph_of(self, module: Any, given: Sequence[Any]) -> list[Any]:
        """The results of a graph inside a node, converted where the builder stands."""
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        with self._sizes.scope():
            for place, value in zip(places, given, strict=True):
                self._take(place, value)
            self._convert_all(module)
            (end,) = (node for node in module.graph.nodes if node.op == "output")
            found = end.args[0] if isinstance(end.args[0], (list, tuple)) else [end.args[0]]
            return [self._value(value) for value in found]

    def _take(self, place: Any, value: Any) -> None:
        """Give an input of an inner graph its value; sizes take the names that the value's have."""
        fake = place.meta.get("val")
        node = self._outside(place.name)
        if isinstance(fake, self._torch.SymInt):
            value = value if isinstance(value, int) or tvm.ir.is_prim_expr(value) else node.read_size(value)
            self._sizes.bind(fake, value)
        elif isinstance(fake, self._torch.Tensor) and isinstance(value, relax.Expr):
            for size, dim in zip(fake.shape, node.dims(value), strict=True):
                self._sizes.bind(size, dim)
        self._values[place] = value

    def _outside(self, name: str) -> TorchNode:
        """A node of no op, for values that belong to none."""
        return TorchNode("value.", NodeInfo(name, (), "value", "", ""), None, (), self, self._sizes)

    def _convert_all(self, module: Any) -> None:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                is_tensor = isinstance(value, self._torch.Tensor)
                self._values[node] = self._constant(value, str(node.target)) if is_tensor else value
            elif node.op == "call_function":
                self._convert(node)

    def _inputs(self) -> dict[str, relax.Var]:
        """Parameters of the function by name; weights, buffers and constants become constants."""
        kinds = self._torch.export.graph_signature.InputKind
        places = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        params: dict[str, relax.Var] = {}
        for spec in self._program.graph_signature.input_specs:
            node = places[spec.arg.name]
            value = node.meta.get("val")
            is_tensor = isinstance(value, self._torch.Tensor)
            if is_tensor and spec.kind is kinds.USER_INPUT and value.dtype.is_complex:
                raise FrontendError(
                    f"the input {node.name!r} is of {value.dtype}, expected its view as real numbers, x.view_as_real()"
                )
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                if node.users:
                    self._values[node] = self._constant(self._folding.value(node), spec.target)
            elif spec.kind is kinds.USER_INPUT and is_tensor:
                for dim in value.shape:
                    if not isinstance(dim, int):
                        self._sizes.known.update(map(str, dim.node.expr.free_symbols))
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
        """A weight, over torch's own memory where kernels can read it; a weight that is shared is one constant."""
        torch = self._torch
        kind = unreadable_reason(tensor)
        if kind:
            raise FrontendError(f"the weight {name!r} is a {kind}, expected a dense tensor")
        tensor = tensor.detach()
        if tensor.dtype.is_complex:
            return Complex(*(self._constant(part.contiguous(), name) for part in (tensor.real, tensor.imag)))
        dtype_name(tensor.dtype, f"the weight {name!r}")
        if tensor.layout != torch.strided:
            tensor = self._densified[name] = tensor.to_dense()
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
        with self._owned(NodeInfo("sizes", (), "require", "", "")):
            for condition, text in self._sizes.ranges(self._program.range_constraints):
                self.bb.match_cast(requirement(condition, f"the exported program: {text}"), MET)

    def _convert(self, node: Any) -> None:
        """Convert a node, and remember that it owns the bindings that are made of it."""
        if node.target is operator.getitem:
            container, index = node.args
            self._values[node] = self._values[container][index]
            return
        value = node.meta.get("val")
        if _is_number(value) and not _is_read(node):
            return  # computed where it is read
        if _op_name(node) in _SILENT or self._is_open(node):
            return
        info = self._names.info(node)
        try:
            with self._owned(info):
                result = self._converted(node, info)
        except FrontendError:
            raise
        except Exception as error:
            raise FrontendError(f"node {info} cannot be imported: {type(error).__name__}: {reason(error)}") from error
        self._values[node] = result
        results = result if isinstance(result, list) else [result]
        self._results[info] = [part for part in results if isinstance(part, relax.Var)]

    def _is_open(self, node: Any) -> bool:
        """Return whether a node asserts a condition over sizes that nobody names."""
        if _op_name(node) not in ("_assert_scalar", "_functional_assert_scalar"):
            return False
        value = node.args[0].meta.get("val") if isinstance(node.args[0], self._torch.fx.Node) else None
        return isinstance(value, self._torch.SymBool) and self._sizes.condition(value) is None

    def _converted(self, node: Any, info: NodeInfo) -> Any:
        value, convert = node.meta.get("val"), _converter_of(node)
        if convert is None:
            found = self._folding.value(node)
            if isinstance(found, (list, tuple)):
                return [self._constant(part, f"{info.name}[{index}]") for index, part in enumerate(found)]
            return self._constant(found, info.name)
        arguments, tensors = self._arguments(node)
        used = frozenset(user.args[1] for user in node.users if user.target is operator.getitem)
        torch_node = TorchNode(_full_name(node), info, value, tensors, self, self._sizes, used)
        if is_complex(value) or has_complex(arguments):
            convert = convert_complex
        elif node.args and self._is_empty(value):  # whatever the op is; some kernels would leave sizes of 0 out
            convert = _empty
        result = convert(torch_node, *arguments)
        if isinstance(value, (list, tuple)):
            parts = [
                None if part is None else self._checked(torch_node, part, fake)
                for part, fake in zip(result, value, strict=False)
            ]
            return parts + [None] * (len(value) - len(parts))
        return self._checked(torch_node, result, value)

    def _is_empty(self, fake: Any) -> bool:
        """Return whether a result, or every one of several, has no elements."""
        if isinstance(fake, (list, tuple)):
            return bool(fake) and all(map(self._is_empty, fake))
        return isinstance(fake, self._torch.Tensor) and any(isinstance(dim, int) and dim == 0 for dim in fake.shape)

    def _checked(self, node: TorchNode, result: Any, fake: Any) -> Any:
        """The result, if it has the type that torch says; its sizes take torch's names."""
        if isinstance(result, Complex):
            return Complex(*(self._checked(node, part, part_of(fake)) for part in result))
        if result is None or not hasattr(fake, "shape"):
            return self._checked_number(node, result, fake)
        result = node.emit(self.bb.normalize(result))
        ty = result.ty
        dims = self._sizes.shape(fake.shape)
        if str(ty.dtype) != dtype_name(fake.dtype) or int(ty.ndim) not in (-1, len(dims)):
            raise node.refusal(f"becomes {ty}, where torch finds {dtype_name(fake.dtype)} of shape {dims}")
        new = {str(symbol) for dim in fake.shape if not isinstance(dim, int) for symbol in dim.node.expr.free_symbols}
        if not isinstance(ty.shape, relax.ShapeExpr) or new - self._sizes.known:
            self._sizes.known |= new
            return self.bb.match_cast(result, relax.TensorType(as_shape(dims), str(ty.dtype)))
        for here, there in zip(node.dims(result), dims, strict=True):
            if not node.sizes_equal(here, there):
                text = f"finds a size of {here}, where torch finds {there}"
                node.onnx_node("Reshape", []).require(equal(here, there), text)
        return renamed(node.onnx_node("Reshape", []), result, dims)

    def _checked_number(self, node: TorchNode, result: Any, fake: Any) -> Any:
        """The number that an op reads from a tensor, or passes on; its symbol means it from here on."""
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
        """Require what torch found about a number that it reads: sizes are not negative."""
        bounds = self._program.range_constraints.get(symbol)
        if bounds is not None and not isinstance(size, int):
            for condition, text in self._sizes.within(size, bounds):
                node.onnx_node("Identity", []).require(condition, f"reads a number that {text}")

    def _arguments(self, node: Any) -> tuple[list[Any], list[Any]]:
        """The values of a node's arguments and their fake tensors, in the order of the op's schema."""
        values, fakes = [], []
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # an op with graphs in it
            return [self._value(given) for given in node.args], list(node.args)
        for index, argument in enumerate(schema.arguments):
            if index < len(node.args):
                given = node.args[index]
            elif argument.name in node.kwargs:
                given = node.kwargs[argument.name]
            else:
                given = argument.default_value
            values.append(self._value(given))
            fakes.append(given.meta.get("val") if isinstance(given, self._torch.fx.Node) else given)
        return values, fakes

    def _value(self, given: Any) -> Any:
        if isinstance(given, self._torch.fx.Node):
            return self._values[given] if given in self._values else self._number(given)
        if isinstance(given, (list, tuple)):
            return [self._value(part) for part in given]
        return given

    def _number(self, given: Any) -> Any:
        """A number that torch computes from sizes, or from numbers that the model reads."""
        torch, value = self._torch, given.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._sizes.dim(value)
        if isinstance(value, torch.SymBool):
            condition = self._sizes.condition(value)
            if condition is not None:
                return condition
        elif isinstance(value, torch.SymFloat):
            return float_scalar(self._outside(given.name), value.node.expr)
        elif value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise FrontendError(f"the value of {given} ({given.target}) cannot be imported: it is no tensor or size")

    def _outputs(self) -> tuple[list[relax.Expr], list[str]]:
        """The module's results, and behind them the new values of inputs that it changes."""
        (node,) = (node for node in self._program.graph.nodes if node.op == "output")
        kinds = self._torch.export.graph_signature.OutputKind
        names = iter(output_names(self._program))
        found: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for spec, given in zip(self._program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind is kinds.USER_INPUT_MUTATION:
                changed[str(spec.target)] = self._value(given)
            elif spec.kind is kinds.USER_OUTPUT:
                found[next(names, f"output_{len(found)}")] = self._value(given)
        outputs = {
            name: self._output(name, value)
            for name, value in (*found.items(), *((f"{name}_out", value) for name, value in changed.items()))
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
        with self._owned(info):
            return TorchNode("output.", info, None, (), self, self._sizes).tensor(value, dtype)


def _empty(node: TorchNode, *_: Any) -> Any:
    """Results without elements."""
    if isinstance(node.value, (list, tuple)):
        return [node.of(fake).filled(0) for fake in node.value]
    return node.filled(0)


def _op_name(node: Any) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def _full_name(node: Any) -> str:
    """Name of an op with its overload."""
    return f"{_op_name(node)}.{getattr(node.target, '_overloadname', 'default')}"


def _converter_of(node: Any) -> Converter | None:
    op = _op_name(node)
    return TABLE.get(_full_name(node)) or TABLE.get(op) or (convert_complex if converts_complex(op) else None)


def _is_read(node: Any) -> bool:
    """Return whether a number is read from a tensor when the model runs, or comes from a graph in the node."""
    return _op_name(node) in ("_local_scalar_dense", "item")


def _is_number(value: Any) -> bool:
    torch = torch_package()
    return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, bool, int, float))


def _folding(program: Any) -> Folding:
    """The nodes of a program that depend on weights alone."""
    tables = {**program.constants, **program.state_dict}
    weights = {
        spec.arg.name: tables[spec.target] for spec in program.graph_signature.input_specs if spec.target in tables
    }
    return Folding(program.graph, weights)


def check_supported(program: Any, folding: Folding) -> None:
    """Refuse a program with ops that no converter knows, naming all, and one that changes buffers."""
    kinds = torch_package().export.graph_signature.OutputKind
    lost = (kinds.BUFFER_MUTATION, getattr(kinds, "PARAMETER_MUTATION", None))
    changed = [spec.target for spec in program.graph_signature.output_specs if spec.kind in lost]
    if changed:
        raise FrontendError(
            f"the module changes {', '.join(map(repr, changed))} when it runs, which a compiled model cannot; "
            "call module.eval() before, or return the new value instead"
        )
    missing = _missing(program.graph_module, NodeNames(), folding)
    if missing:
        raise FrontendError(f"the exported program has ops that cannot be imported: {'; '.join(missing)}")


def _missing(module: Any, names: NodeNames, folding: Folding) -> list[str]:
    """The nodes of a graph, and of graphs inside its nodes, that no converter knows."""
    found = []
    for node in module.graph.nodes:
        op = _op_name(node)
        if node.op == "get_attr":
            inner = module
            for part in str(node.target).split("."):
                inner = getattr(inner, part)
            found += _missing(inner, names, folding) if hasattr(inner, "graph") else []
        elif node.op in ("call_module", "call_method"):
            found.append(f"node {node.name!r}: {node.target}")
        elif node.op == "call_function" and node.target is not operator.getitem:
            is_size = _is_number(node.meta.get("val")) and not _is_read(node)
            if not (is_size or op in _SILENT or _converter_of(node) is not None or node in folding):
                found.append(f"node {names.info(node).name!r}: {node.target}")
    return found
