"""The walk over the nodes of an exported program: from FX to Relax bindings that know their modules."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax, tirx

from ...errors import FrontendError
from ...op.require import MET, requirement
from ...vm.device.tensors import ALIGNMENT
from ..import_limits import Budget, ImportLimits, spending
from ..onnx.importer import ImportedGraph
from ..onnx.node_names import NodeInfo, variable_name
from ..onnx.tvm_messages import reason
from . import ops  # noqa: F401 - registers the converters
from .exporting import torch_package
from .node import TABLE, TorchNode, dtype_name
from .sizes import Sizes, as_shape
from .torch_names import NodeNames, output_names

if TYPE_CHECKING:
    import torch

# Nodes that say something about sizes to torch alone: the sizes are in the results already.
_SILENT = frozenset(
    "sym_constrain_range_for_size sym_constrain_range _assert_tensor_metadata _assert_async _assert_scalar "
    "_functional_assert_async _functional_assert_scalar _functional_sym_constrain_range "
    "_functional_sym_constrain_range_for_size".split()
)


def import_program(
    program: torch.export.ExportedProgram, names: Mapping[str, str], limits: ImportLimits | None
) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
    """Convert an exported program.

    Parameters
    ----------
    names: Symbol of torch -> name of the size.

    Returns
    -------
    The graph, its nodes, and the names of its outputs.

    Raises
    ------
    FrontendError: If an op cannot be converted; names it, its module and the reason.
    """
    nbytes = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    with spending(Budget(limits or ImportLimits(), nbytes)):
        return _Importer(program, Sizes(names)).run()


class _Importer:
    def __init__(self, program: Any, sizes: Sizes) -> None:
        self._torch = torch_package()
        self._program = program
        self._sizes = sizes
        self._names = NodeNames()
        self._builder = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}
        self._owners: dict[relax.Var, NodeInfo] = {}
        self._results: dict[NodeInfo, list[relax.Var]] = {}
        self._constants: dict[tuple[Any, ...], relax.Expr] = {}

    def run(self) -> tuple[ImportedGraph, list[NodeInfo], list[str]]:
        check_supported(self._program)
        params = self._inputs()
        self._builder.begin_scope(list(params.values()))
        try:
            with self._block() as bindings:
                self._require_ranges()
                for node in self._program.graph.nodes:
                    if node.op == "call_function":
                        self._convert(node)
                outputs, names = self._outputs()
        finally:
            self._builder.end_scope()
        nodes = list(dict.fromkeys(self._owners.values()))
        graph = ImportedGraph(
            self._builder.get(), list(params), list(params.values()), bindings, outputs, self._owners, self._results, {}
        )
        return graph, nodes, names

    @contextmanager
    def _block(self) -> Iterator[list[relax.Binding]]:
        bindings: list[relax.Binding] = []
        self._builder._begin_binding_block()
        try:
            yield bindings
        finally:
            bindings.extend(self._builder._end_block().bindings)

    @contextmanager
    def _owned(self, info: NodeInfo) -> Iterator[None]:
        """Bindings that are made inside belong to this node."""
        with self._block() as bindings:
            yield
        for binding in bindings:
            self._owners[binding.var] = info
            self._builder.emit_normalized(binding)

    def _inputs(self) -> dict[str, relax.Var]:
        """Parameters of the function by name; weights, buffers and constants become constants."""
        kinds = self._torch.export.graph_signature.InputKind
        places = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        params: dict[str, relax.Var] = {}
        for spec in self._program.graph_signature.input_specs:
            node = places[spec.arg.name]
            value = node.meta.get("val")
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                self._values[node] = self._constant(self._weight(spec), spec.target)
            elif spec.kind is kinds.USER_INPUT and isinstance(value, self._torch.Tensor):
                for dim in value.shape:
                    if not isinstance(dim, int):
                        self._sizes.known.update(map(str, dim.node.expr.free_symbols))
                ty = relax.TensorType(as_shape(self._sizes.shape(value.shape)), dtype_name(value.dtype))
                params[node.name] = relax.Var(variable_name(node.name), ty)
                self._values[node] = params[node.name]
            elif spec.kind is kinds.USER_INPUT and (value is None or isinstance(value, (bool, int, float, str))):
                self._values[node] = value
            else:
                raise FrontendError(
                    f"the input {node.name!r} of the exported program is a {type(value).__name__}, expected a tensor"
                )
        return params

    def _weight(self, spec: Any) -> Any:
        program = self._program
        for table in (program.state_dict, program.constants):
            if spec.target in table:
                return table[spec.target]
        raise FrontendError(f"the exported program has no tensor {spec.target!r}")

    def _constant(self, tensor: Any, name: str) -> relax.Expr:
        """A weight, over torch's own memory where kernels can read it; a weight that is shared is one constant."""
        torch = self._torch
        if not isinstance(tensor, torch.Tensor) or type(tensor).__name__ == "FakeTensor" or tensor.is_meta:
            raise FrontendError(f"the weight {name!r} is a {type(tensor).__name__} without numbers, expected a tensor")
        dtype_name(tensor.dtype)
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if key in self._constants:
            return self._constants[key]
        dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu().contiguous().resolve_neg()
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
        info = NodeInfo("sizes", (), "require", "", "")
        with self._owned(info):
            for condition, text in self._sizes.ranges(self._program.range_constraints):
                self._builder.match_cast(requirement(condition, f"the exported program: {text}"), MET)

    def _convert(self, node: Any) -> None:
        """Convert a node, and remember that it owns the bindings that are made of it."""
        if node.target is operator.getitem:
            container, index = node.args
            self._values[node] = self._values[container][index]
            return
        value = node.meta.get("val")
        if isinstance(value, (self._torch.SymInt, int)) and not _is_read(node):
            self._values[node] = self._sizes.dim(value)
            return
        if isinstance(value, (self._torch.SymBool, self._torch.SymFloat, bool, float)):
            return  # of use to torch's own checks; a reader that needs it says so
        if _op_name(node) in _SILENT:
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

    def _converted(self, node: Any, info: NodeInfo) -> Any:
        name = f"{_op_name(node)}.{node.target._overloadname}"
        value = node.meta["val"]
        arguments, tensors = self._arguments(node)
        torch_node = TorchNode(name, info.name, value, tensors, self._builder, self._sizes)
        convert = TABLE.get(name) or TABLE[_op_name(node)]
        result = convert(torch_node, *arguments)
        if isinstance(value, (list, tuple)):
            parts = [
                None if part is None else self._checked(torch_node, part, fake)
                for part, fake in zip(result, value, strict=False)
            ]
            return parts + [None] * (len(value) - len(parts))
        if not isinstance(value, self._torch.Tensor):  # a size that a tensor holds
            return result
        return self._checked(torch_node, result, value)

    def _checked(self, node: TorchNode, result: relax.Expr, fake: Any) -> relax.Expr:
        """The result, if it has the type that torch says; sizes that only a call knows take torch's names."""
        if result is None:
            return None
        result = node.emit(self._builder.normalize(result))
        ty = result.ty
        dims = self._sizes.shape(fake.shape)
        found = list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None
        if str(ty.dtype) != dtype_name(fake.dtype) or int(ty.ndim) not in (-1, len(dims)):
            raise node.refusal(f"becomes {ty}, where torch finds {dtype_name(fake.dtype)} of shape {dims}")
        new = {str(symbol) for dim in fake.shape if not isinstance(dim, int) for symbol in dim.node.expr.free_symbols}
        if found is None or new - self._sizes.known:
            self._sizes.known |= new
            return self._builder.match_cast(result, relax.TensorType(as_shape(dims), str(ty.dtype)))
        for here, there in zip(found, dims, strict=True):
            if isinstance(here, tirx.IntImm) and isinstance(there, int) and int(here) != there:
                raise node.refusal(f"becomes {ty}, where torch finds the shape {dims}")
        return result

    def _arguments(self, node: Any) -> tuple[list[Any], list[Any]]:
        """The values of a node's arguments and their fake tensors, in the order of the op's schema."""
        values, fakes = [], []
        for index, argument in enumerate(node.target._schema.arguments):
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
            if given not in self._values:
                raise FrontendError(
                    f"the value of {given} ({given.target}) cannot be imported: it is no tensor or size"
                )
            return self._values[given]
        if isinstance(given, (list, tuple)):
            return [self._value(part) for part in given]
        return given

    def _outputs(self) -> tuple[list[relax.Expr], list[str]]:
        (node,) = (node for node in self._program.graph.nodes if node.op == "output")
        kinds = self._torch.export.graph_signature.OutputKind
        names = output_names(self._program)
        outputs, kept = [], []
        user = 0
        for spec, given in zip(self._program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind is not kinds.USER_OUTPUT:
                continue
            name = names[user] if user < len(names) else f"output_{user}"
            user += 1
            value = self._value(given)
            if value is None or isinstance(value, str):
                continue
            if not isinstance(value, relax.Expr) or tvm.ir.is_prim_expr(value):
                dtype = "bool" if isinstance(value, bool) else "float32" if isinstance(value, float) else "int64"
                info = NodeInfo(variable_name(name), (), "output", "", "")
                with self._owned(info):
                    value = TorchNode("output.", name, None, (), self._builder, self._sizes).tensor(value, dtype)
            outputs.append(value)
            kept.append(name)
        if not outputs:
            raise FrontendError("the module returns no tensor")
        return outputs, kept


def _op_name(node: Any) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def _is_read(node: Any) -> bool:
    """Whether a number is read from a tensor, when the model runs."""
    return _op_name(node) in ("_local_scalar_dense", "item")


def check_supported(program: Any) -> None:
    """Refuse a program with ops that no converter knows, naming all, and one that changes buffers or inputs."""
    torch = torch_package()
    kinds = torch.export.graph_signature.OutputKind
    changed = [
        spec.target
        for spec in program.graph_signature.output_specs
        if spec.kind in (kinds.BUFFER_MUTATION, kinds.USER_INPUT_MUTATION)
    ]
    if changed:
        raise FrontendError(
            f"the module changes {', '.join(map(repr, changed))} when it runs, which a compiled model cannot; "
            "call module.eval() before, or return the new value instead"
        )
    names = NodeNames()
    missing = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            value = node.meta.get("val")
            is_size = isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool))
            op = _op_name(node)
            overload = getattr(node.target, "_overloadname", "")
            if not ((is_size and not _is_read(node)) or op in _SILENT or op in TABLE or f"{op}.{overload}" in TABLE):
                missing.append(f"node {names.info(node).name!r}: {node.target}")
        elif node.op == "call_module" or node.op == "call_method":
            missing.append(f"node {node.name!r}: {node.target}")
    if missing:
        raise FrontendError(f"the exported program has ops that cannot be imported: {'; '.join(missing)}")
