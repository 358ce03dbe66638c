"""Graph inputs as Relax parameters: names, dtypes, symbolic and pinned dimensions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import tvm
from tvm import relax, tirx

from ...artifact.messages import near_misses
from ...errors import FrontendError
from ..import_limits import MAX_RANK
from .node_names import variable_name

# Type of `shapes=`: the dimensions of an input, or the value of a named dimension.
Shapes: TypeAlias = "Mapping[str, Sequence[int | str | None] | int | str | Sequence[Sequence[int | str | None]] | None]"
_Dim: TypeAlias = "int | str | None"

_MAX_SIZE = 2**63 - 1
_MAX_EXPRESSION_CHARACTERS = 256  # a longer text is an opaque name
_MAX_NAME_CHARACTERS = 4096
_ANY_SIZE = frozenset({"?", "*", "-1", "None"})

_OPERATORS: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # exporters write "/" for integer division
}


def graph_inputs(
    graph: onnx.GraphProto,
    # ``{"input": [1, 128]}`` sets an input's shape (None keeps the model's dimension, a string names a symbolic one).
    # ``{"batch": 1}`` sets a named dimension wherever it occurs, and ``{"total": "past + seq"}`` sets it to an
    # expression of other dimensions. ``{"list": [[2], [3]]}`` sets the shape of each tensor of a sequence.
    # ``{"extra": None}`` declares an optional input to be empty.
    shapes: Shapes | None,
    defaults: Collection[str] = (),  # inputs whose initializers are defaults (`default_inputs`)
) -> dict[str, relax.Var]:
    """Create a parameter for each input that is not a weight, in the model's order; those with defaults come last.

    Returns the variable of each ONNX name, which has that name as far as TVMScript can parse it. Dimensions of one name
    share one symbolic variable; nameless ones get their own, ``<input>_d<axis>``. A sequence is a tuple; empty
    optionals are omitted. Raises FrontendError if an input is a sequence of unknown length or of another type, or
    `shapes` names an input or a dimension that the model lacks, or contradicts the model or itself; or a default has
    another type.
    """
    if shapes is not None and not isinstance(shapes, Mapping):
        raise FrontendError(f"shapes is {shapes!r}; expected a mapping of inputs or named dimensions to sizes")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    weights.update((sparse.values.name, sparse.values) for sparse in graph.sparse_initializer)
    shape_entries: dict[str, Any] = dict(shapes or {})
    entries = [info for info in graph.input if info.name not in weights]
    entries += [info for info in graph.input if info.name in defaults]
    infos, sequences = _flatten_inputs(entries, shape_entries)
    dims = {info.name: _declared_dims(info) for info in infos}
    fixed_sizes = _apply_shapes(dims, shape_entries)
    names = {dim for shape in dims.values() for dim in shape or () if isinstance(dim, str)}
    symbols = _Symbols(fixed_sizes, names)
    for name in fixed_sizes:
        symbols.value(name)  # raises if a dimension that is an expression differs from its size in `shapes`
    tensors = {info.name: _parameter(info, dims[info.name], symbols) for info in infos}
    for name in defaults:
        _check_default(name, weights[name], tensors[name])
    return _join_sequences(tensors, sequences, [info.name for info in entries])


def _check_default(name: str, default: onnx.TensorProto, param: relax.Var) -> None:
    shape, dtype = list(default.dims), dtype_name(default.data_type, f"initializer {name!r}")
    dims = list(param.ty.shape.values) if isinstance(param.ty.shape, relax.ShapeExpr) else shape
    sizes = [int(dim) if isinstance(dim, int | tirx.IntImm) else size for dim, size in zip(dims, shape, strict=False)]
    if dtype != str(param.ty.dtype) or len(dims) != len(shape) or sizes != shape:
        raise FrontendError(f"input {name!r} is {param.ty}, but its default has the shape {shape} of {dtype}")


def _flatten_inputs(
    infos: list[onnx.ValueInfoProto], shape_entries: dict[str, Any]
) -> tuple[list[onnx.ValueInfoProto], dict[str, list[str]]]:
    """Flatten inputs to tensors: an optional becomes its content, a sequence its elements.

    Returns
    -------
    tensors : list of onnx.ValueInfoProto
        On return `shape_entries` has the shape of each element instead of entries for sequences and empty optionals.
    sequences : dict of str to list of str
        Name of a sequence -> names of its elements. Empty optionals are in neither.
    """
    tensors: list[onnx.ValueInfoProto] = []
    sequences: dict[str, list[str]] = {}
    for info in infos:
        ty, is_optional = info.type, info.type.HasField("optional_type")
        if is_optional:
            if info.name in shape_entries and shape_entries[info.name] is None:
                del shape_entries[info.name]
                continue
            ty = ty.optional_type.elem_type
        if not ty.HasField("sequence_type"):
            tensors.append(onnx.ValueInfoProto(name=info.name, type=ty))
            continue
        elements = shape_entries.pop(info.name, None)
        if not _is_list(elements) or not all(map(_is_list, elements)):
            raise FrontendError(
                f"input {info.name!r} is a sequence, whose length must be known at import: give the shapes of its "
                f"tensors, such as shapes={{{info.name!r}: [[2, 3], [4, 3]]}}, found {elements!r}"
            )
        sequences[info.name] = [f"{info.name}_{index}" for index in range(len(elements))]
        for name, shape in zip(sequences[info.name], elements, strict=True):
            if name in shape_entries or any(name == other.name for other in infos):
                raise FrontendError(f"element {name!r} of the sequence {info.name!r} has the name of another input")
            element = onnx.ValueInfoProto(name=name, type=ty.sequence_type.elem_type)
            for dim in element.type.tensor_type.shape.dim:
                dim.ClearField("dim_param")  # elements of one sequence may differ in named dimensions
            tensors.append(element)
            shape_entries[name] = shape
    return tensors, sequences


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _join_sequences(
    tensors: dict[str, relax.Var], sequences: Mapping[str, Sequence[str]], order: Sequence[str]
) -> dict[str, relax.Var]:
    """The parameters in the model's order, with a tuple for each sequence."""
    params: dict[str, relax.Var] = {}
    for name in order:
        if name in sequences:
            ty = tvm.ir.TupleType([tensors[element].ty for element in sequences[name]])
            params[name] = relax.Var(variable_name(name), ty)
        elif name in tensors:
            params[name] = tensors[name]
    return params


def _declared_dims(info: onnx.ValueInfoProto) -> list[_Dim] | None:
    """The declared dimensions, each a number, a name or None; None for an unknown rank."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise FrontendError(
            f"input {info.name!r} is a {(kind or 'value without type').removesuffix('_type')}; "
            "only tensors, sequences of them and optionals can be inputs"
        )
    if not info.type.tensor_type.HasField("shape"):
        return None
    dims: list[_Dim] = []
    rank = len(info.type.tensor_type.shape.dim)
    if rank > MAX_RANK:
        raise FrontendError(f"input {info.name!r} has {rank:,} dimensions, expected at most {MAX_RANK}")
    for dim in info.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            # Exporters write -1, which ONNX does not define, for "any".
            dims.append(int(dim.dim_value) if dim.dim_value >= 0 else None)
        else:
            if len(dim.dim_param) > _MAX_NAME_CHARACTERS:
                raise FrontendError(
                    f"input {info.name!r} has a dimension whose name has {len(dim.dim_param):,} letters, expected at "
                    f"most {_MAX_NAME_CHARACTERS:,}"
                )
            dims.append(dim_name(dim) or None)
    return dims


def dim_name(dim: onnx.TensorShapeProto.Dimension) -> str:
    """The name of a dimension; empty if it is nameless or has a name that exporters write for any size."""
    name: str = dim.dim_param.strip()
    return "" if name in _ANY_SIZE else name


def _apply_shapes(dims: dict[str, list[_Dim] | None], shapes: dict[str, Sequence[_Dim] | int]) -> dict[str, int]:
    """Write the shapes of inputs into `dims` and return the values of named dimensions."""
    names = {dim for shape in dims.values() for dim in shape or () if isinstance(dim, str)}
    names |= {symbol for name in names for symbol in _symbols_in(name)}
    fixed_sizes: dict[str, int] = {}
    expressions: dict[str, ast.expr] = {}
    for key, value in shapes.items():
        if key in names and key not in dims and isinstance(value, str):
            expressions[key] = _parse_size_expression(key, value, names, expressions)
        elif key in dims and not _is_int(value):
            _set_input_shape(key, dims, value, fixed_sizes)
        elif key in names and _is_int(value):
            _fix_size(key, _size(value, f"shapes[{key!r}]"), fixed_sizes)
        else:
            raise FrontendError(_bad_key_message(key, value, list(dims), sorted(names)))
    for name in expressions.keys() & fixed_sizes.keys():
        raise FrontendError(f"dimension {name!r} is given twice in shapes: {fixed_sizes[name]} and {shapes[name]!r}")
    if expressions:
        for name, shape in dims.items():
            dims[name] = shape and [_substitute(dim, expressions) if isinstance(dim, str) else dim for dim in shape]
    return fixed_sizes


def _parse_size_expression(name: str, text: str, names: set[str], expressions: Mapping[str, ast.expr]) -> ast.expr:
    """Parse the expression that `shapes` gives for a named dimension, of dimensions that are not given so."""
    tree, used = _parse(text), _symbols_in(text)
    candidates = sorted(names - {name} - set(expressions))
    if tree is None or not used or not used <= set(candidates) or not name.isidentifier():
        raise FrontendError(
            f"shapes[{name!r}] is {text!r}; expected a whole number, or arithmetic (+, -, *, //) of other named "
            f"dimensions of the model: {', '.join(candidates) or 'it has none'}"
        )
    return tree


class _Substitute(ast.NodeTransformer):
    def __init__(self, expressions: Mapping[str, ast.expr]) -> None:
        self._expressions = expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._expressions.get(node.id, node)


def _substitute(dim: str, expressions: Mapping[str, ast.expr]) -> str:
    """Replace names in a dimension by their expressions."""
    tree = _parse(dim)
    if tree is None or not _symbols_in(dim) & expressions.keys():
        return dim
    return ast.unparse(_Substitute(expressions).visit(tree))


def _set_input_shape(name: str, dims: dict[str, list[_Dim] | None], sizes: object, fixed_sizes: dict[str, int]) -> None:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise FrontendError(f"shapes[{name!r}] must be a list of dimensions, got {sizes!r}")
    declared = dims[name]
    if declared is not None and len(sizes) != len(declared):
        raise FrontendError(
            f"shapes[{name!r}] has {len(sizes)} dimensions {list(sizes)}, the model's input has "
            f"{len(declared)}: {declared}"
        )
    shape: list[_Dim] = []
    for axis, (new, old) in enumerate(zip(sizes, declared or [None] * len(sizes), strict=True)):
        where = f"shapes[{name!r}][{axis}]"
        if new is None:
            shape.append(old)
        elif isinstance(new, str):
            if old is not None and new != old:
                raise FrontendError(f"{where} is {new!r}, but that dimension is {old!r} in the model")
            shape.append(new)
        else:
            size = _size(new, where)
            if isinstance(old, int) and old != size:
                raise FrontendError(f"{where} is {size}, but that dimension is {old} in the model")
            if isinstance(old, str):
                _fix_size(old, size, fixed_sizes)
            shape.append(size)
    dims[name] = shape


def _fix_size(name: str, size: int, fixed_sizes: dict[str, int]) -> None:
    if fixed_sizes.setdefault(name, size) != size:
        raise FrontendError(f"dimension {name!r} is given two sizes in shapes: {fixed_sizes[name]} and {size}")


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__")


def _size(value: object, where: str) -> int:
    if isinstance(value, bool) or not _is_int(value) or operator.index(value) < 0:  # type: ignore[arg-type]
        raise FrontendError(f"{where} must be a whole number >= 0, got {value!r}")
    size = operator.index(value)  # type: ignore[arg-type]
    if size > _MAX_SIZE:
        raise FrontendError(f"{where} is {size}, which no 64-bit size can be")
    return size


def _bad_key_message(key: object, value: object, inputs: list[str], names: list[str]) -> str:
    if key in inputs:
        return f"shapes[{key!r}] is {value!r}, but {key!r} is an input: give a list of its dimensions"
    if key in names:
        return (
            f"shapes[{key!r}] is {value!r}, but {key!r} is a named dimension: give one whole number, or arithmetic of "
            "other named dimensions"
        )
    choices = f"inputs: {', '.join(inputs) or 'none'}; named dimensions: {', '.join(names) or 'none'}"
    hint = near_misses(str(key), [*inputs, *names])
    return f"shapes names {key!r}, which is neither an input nor a named dimension of the model{hint}; {choices}"


class _Symbols:
    """Symbolic variables by dimension name; a name may be an expression of others ("2*n", "n + 1")."""

    def __init__(self, fixed_sizes: dict[str, int], names: set[str]) -> None:
        self._fixed_sizes = fixed_sizes
        self._vars: dict[str, tirx.Var] = {}
        self._used_names: set[str] = set()
        # Run time can only solve for a symbol that is a whole dimension somewhere.
        self._solvable = {name for name in names if name.isidentifier()} | set(fixed_sizes)

    def value(self, name: str) -> object:
        """The value of a dimension: an int, a variable, or an expression of variables."""
        tree = _parse(name)
        if tree is not None and not isinstance(tree, ast.Name) and _symbols_in(name) <= self._solvable:
            return self._check_value(name, self._evaluate(tree))
        if name in self._fixed_sizes:
            return self._fixed_sizes[name]
        return self.variable(name)

    def variable(self, name: str) -> tirx.Var:
        if name not in self._vars:
            self._vars[name] = self.fresh(name)
        return self._vars[name]

    def fresh(self, name: str) -> tirx.Var:
        """A new variable with a unique identifier made from `name`."""
        base = unique = re.sub(r"\W", "_", name)
        while unique in self._used_names:
            unique = f"{base}_{len(self._used_names)}"
        self._used_names.add(unique)
        return tirx.Var(unique, "int64")

    def _check_value(self, name: str, value: object) -> object:
        if isinstance(value, int) and self._fixed_sizes.get(name, value) != value:
            raise FrontendError(
                f"dimension {name!r} is given as {self._fixed_sizes[name]} in shapes, but comes to {value}"
            )
        if isinstance(value, int) and value < 0:
            raise FrontendError(f"dimension {name!r} comes to {value} with the sizes given in shapes")
        return self._fixed_sizes.get(name, value)

    def _evaluate(self, tree: ast.expr) -> object:
        if isinstance(tree, ast.Constant):
            return tree.value
        if isinstance(tree, ast.Name):
            return self.value(tree.id)
        assert isinstance(tree, ast.BinOp)
        left, right = self._evaluate(tree.left), self._evaluate(tree.right)
        try:
            value = _OPERATORS[type(tree.op)](left, right)
            if isinstance(value, int) and abs(value) > _MAX_SIZE:
                raise FrontendError(f"dimension {ast.unparse(tree)!r} comes to {value}, which no 64-bit size can be")
            return value
        except ZeroDivisionError as error:
            raise FrontendError(f"dimension {ast.unparse(tree)!r} divides by zero") from error


def _parse(name: str) -> ast.expr | None:
    """Parse a dimension's name as arithmetic on integers and names; None if it is an opaque name."""
    if len(name) > _MAX_EXPRESSION_CHARACTERS:  # parsing and evaluating recurse
        return None
    try:
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if _is_arithmetic(tree) else None


def _is_arithmetic(tree: ast.expr) -> bool:
    if isinstance(tree, ast.BinOp):
        return type(tree.op) in _OPERATORS and _is_arithmetic(tree.left) and _is_arithmetic(tree.right)
    return isinstance(tree, ast.Name) or (
        isinstance(tree, ast.Constant) and type(tree.value) is int and tree.value <= _MAX_SIZE
    )


def _symbols_in(name: str) -> set[str]:
    tree = _parse(name)
    return set() if tree is None else {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _parameter(info: onnx.ValueInfoProto, dims: list[_Dim] | None, symbols: _Symbols) -> relax.Var:
    dtype = dtype_name(info.type.tensor_type.elem_type, f"input {info.name!r}")
    name = variable_name(info.name)
    if dims is None:
        return relax.Var(name, relax.TensorType(None, dtype, ndim=-1))
    shape = [
        symbols.fresh(f"{info.name}_d{axis}") if dim is None else symbols.value(dim) if isinstance(dim, str) else dim
        for axis, dim in enumerate(dims)
    ]
    return relax.Var(name, relax.TensorType(shape, dtype))


def dtype_name(elem_type: int, what: str) -> str:
    """TVM's name of an ONNX element type; raises FrontendError with `what` for a type that TVM lacks."""
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        name = onnx.TensorProto.DataType.Name(elem_type)
    except (KeyError, ValueError) as error:
        raise FrontendError(f"{what} has the unknown element type {elem_type}") from error
    if dtype.kind in "OUSc" or elem_type == onnx.TensorProto.STRING:
        raise FrontendError(f"{what} has elements of type {name}, which TVM has no tensors of")
    return str(dtype)
