"""From a PyTorch module to an exported program of the ops that this library converts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...artifact.file_hints import describe_value
from ...errors import FrontendError
from ..onnx.node_names import NodeInfo

if TYPE_CHECKING:
    import torch


# Names of an exported program: of nodes by the modules they are in, of outputs by the structure they come back in.

_LOCAL = "L['self']"


class NodeNames:
    """Hands out names, unique among themselves: ``encoder.layer.3.output.dense.linear``."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def info(self, node: Any) -> NodeInfo:
        """The name of an FX node; patterns match its op, and the paths and classes of the modules that it is in."""
        stack = [(_path(path), kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]
        schema = getattr(node.target, "_schema", None)
        op = str(schema.name).split("::")[1] if schema is not None else getattr(node.target, "__name__", "op")
        path = stack[-1][0] if stack else ""
        wanted = f"{path}.{op.lstrip('_')}" if path else op.lstrip("_")
        count = self._taken.get(wanted, 0)
        self._taken[wanted] = count + 1
        name = wanted
        while count and name in self._taken:
            name = f"{wanted}_{count}"
            count += 1
        self._taken.setdefault(name, 1)
        paths = [inner for inner, _ in stack if inner]
        kinds = [(kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1] for _, kind in stack]
        aliases = (op, f"aten.{op}", *dict.fromkeys(paths), *dict.fromkeys(kinds))
        return NodeInfo(name, aliases, op, "", "")


def _path(path: str) -> str:
    path = path.removeprefix(_LOCAL)
    return path.replace("['", ".").replace("']", "").replace("._modules", "").strip(".")


def output_names(program: Any) -> list[str]:
    """A name for each leaf of what the module returns: keys of dictionaries and fields, positions of others."""
    from torch.utils import _pytree as pytree

    spec = program.call_spec.out_spec
    if spec is None:
        return []
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaves, _ = pytree.tree_flatten_with_path(tree)
    names = []
    for index, (path, _) in enumerate(leaves):
        parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
        text = "_".join(part for part in parts if part)
        names.append(text if text and not text[0].isdigit() else f"output_{text or index}")
    return names


# Ops that torch would decompose, and that stay whole: kernels of this library compute them, or find them more easily.
# torch 2.13 decomposes the last one wrongly; kept whole, it is refused.
_KEPT = frozenset(
    "linear layer_norm group_norm instance_norm rms_norm gelu silu hardswish hardsigmoid mish softplus elu leaky_relu "
    "scaled_dot_product_attention einsum matmul softmax log_softmax upsample_nearest1d upsample_nearest2d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa pixel_shuffle adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d "
    "max_pool1d max_pool2d max_pool3d grid_sampler prelu embedding addmm baddbmm tril triu log1p expm1 "
    "split split_with_sizes unbind stack index_select cumsum reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d pad dropout native_dropout lstm gru rnn_tanh rnn_relu one_hot index_add index_copy "
    "multilabel_margin_loss_forward".split()
)

# Ops that the core of ATen has, and that torch decomposes for its own compiler.
_DECOMPOSED = frozenset("dist ldexp".split())

# Arguments, and their values with which an op that may draw random numbers draws none.
_DRAWS_NONE = {"train": False, "training": False, "p": 0, "dropout_p": 0, "dropout": 0, "num_layers": 1}


def torch_package() -> Any:
    """PyTorch.

    Raises
    ------
    FrontendError
        If it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise FrontendError(
            "rh.from_torch needs PyTorch, which is not installed; pip install 'relax-hetero[torch]'"
        ) from error
    return torch


def exported_program(
    source: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """A functional program of few ops, from a module or from a program that somebody exported.

    Raises
    ------
    FrontendError
        If the arguments do not fit each other, or torch cannot export the module.
    """
    torch = torch_package()
    if isinstance(source, torch.export.ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise FrontendError(
                "from_torch: an ExportedProgram has its inputs already; example_args, example_kwargs and "
                "dynamic_shapes are for modules"
            )
        program = source
    elif isinstance(source, torch.jit.ScriptModule):
        raise FrontendError(
            "from_torch: found a ScriptModule, which torch does not export; expected the module that it was made of"
        )
    elif isinstance(source, torch.nn.Module):
        program = _export(torch, source, args, kwargs, dynamic_shapes)
    else:
        raise FrontendError(
            f"rh.from_torch: {describe_value(source, 'rh.from_torch')}; expected a torch.nn.Module or ExportedProgram"
        )
    _refuse_random(program, lambda node: _argument(node, "train", "training") is not None)
    table = torch.export.default_decompositions()
    kept = _KEPT - {"lstm"} if any(map(_is_projected, _calls(program))) else _KEPT
    for op in [op for op in table if op._schema.name.split("::")[1] in kept]:
        table.pop(op)
    for op, decomposition in torch._decomp.decomposition_table.items():
        if getattr(op, "__name__", "").partition(".")[0] in _DECOMPOSED:
            table[op] = decomposition
    try:
        program = program.run_decompositions(table)
    except Exception as error:
        raise FrontendError(f"torch cannot decompose the exported program: {_first_lines(error)}") from error
    for graph in _graphs(program):  # random numbers that nothing reads are not drawn
        graph.eliminate_dead_code(lambda node: node.is_impure() and not _is_random(node))
    _refuse_random(program)
    return program


def _graphs(program: Any) -> list[Any]:
    """The graph of a program, and those inside its nodes."""
    return [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]


def _calls(program: Any) -> list[Any]:
    """The nodes that call an op."""
    return [node for graph in _graphs(program) for node in graph.nodes if node.op == "call_function"]


def _is_projected(node: Any) -> bool:
    """Return whether an op is an LSTM with projections, which ONNX lacks: torch unrolls it."""
    if not str(node.target).startswith("aten.lstm.input"):
        return False
    layers, directions = _argument(node, "num_layers"), 2 if _argument(node, "bidirectional") else 1
    return len(_argument(node, "params")) > (4 if _argument(node, "has_biases") else 2) * layers * directions


def _argument(node: Any, *names: str) -> Any:
    """The value of a node's first argument that has one of these names, or None."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in names:
            return (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
    return None


def _is_random(node: Any) -> bool:
    """Return whether a node draws random numbers, given its arguments."""
    if torch_package().Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not any(_argument(node, name) == value for name, value in _DRAWS_NONE.items())


def _refuse_random(program: Any, among: Callable[[Any], bool] = lambda node: True) -> None:
    """Refuse random numbers, which a compiled model would repeat in every call.

    Ops of modules in training are looked for in the program as it was exported: decompositions hide what they are.
    """
    names = NodeNames()
    random = [node for node in _calls(program) if _is_random(node) and among(node)]
    titles = [f"node {names.info(node).name!r}: {node.target}" for node in random]
    if titles:
        raise FrontendError(
            f"the module draws random numbers, which a compiled model would repeat in every call: {'; '.join(titles)}; "
            "call module.eval() before it is exported, or give the numbers as an input"
        )


def _export(torch: Any, module: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> Any:
    if args is None and kwargs is None:
        raise FrontendError("from_torch: a module needs example_args (or example_kwargs) to be exported with")
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list, type(None))):
        raise FrontendError(f"from_torch: example_args is a {type(args).__name__}, expected a tuple of arguments")
    _check_storage(torch, module, args, kwargs)

    def export() -> Any:
        with torch.no_grad():
            return torch.export.export(
                module, tuple(args or ()), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )

    before, after = _numbers(module), {}
    hook = module.register_forward_hook(lambda *_: after.update(_numbers(module)))
    try:
        program = export()
    except Exception as error:
        raise FrontendError(f"torch cannot export {type(module).__name__}: {_first_lines(error)}") from error
    finally:
        hook.remove()
    changed = {key: value for key, value in after.items() if before.get(key, value) != value}
    if changed and _differs(module, program, export, before, changed):
        names = ", ".join(repr(".".join(filter(None, key))) for key in changed)
        raise FrontendError(
            f"the module changes {names} when it runs, and computes something else in the next call; a compiled model "
            "cannot: take the number as an input, and return the new one"
        )
    return program


_Numbers: TypeAlias = "dict[tuple[str, str], bool | int | float]"


def _numbers(module: Any) -> _Numbers:
    """(path of a submodule, name of an attribute) -> number, for all attributes that are numbers."""
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float))
    }


def _differs(module: Any, program: Any, export: Callable[[], Any], before: _Numbers, changed: _Numbers) -> bool:
    """True if a module exports to another program after its numbers have changed; with caches that fill once, not."""

    def assign(numbers: _Numbers) -> None:
        for path, name in changed:
            vars(module.get_submodule(path))[name] = numbers[path, name]

    assign(changed)
    try:
        return str(export().graph) != str(program.graph)
    except Exception:  # the rest of the module's state has not changed along
        return False
    finally:
        assign(before)


def _check_storage(torch: Any, module: Any, args: Any, kwargs: Any) -> None:
    """Refuse tensors that torch cannot export, or that have no elements to read, by their names."""
    tree = torch.utils._pytree
    given, _ = tree.tree_flatten_with_path({"example_args": tuple(args or ()), "example_kwargs": dict(kwargs or {})})
    inputs = [(f"{path[0].key}{tree.keystr(path[1:])}", value) for path, value in given]
    weights = [*module.named_parameters(), *module.named_buffers()]
    for is_input, (name, value) in [*((True, pair) for pair in inputs), *((False, pair) for pair in weights)]:
        if not isinstance(value, torch.Tensor):
            continue
        kind = unreadable_reason(value)
        if is_input and not kind.startswith(("nested", "quantized")):  # example arguments are read for shapes alone
            kind = "" if value.layout == torch.strided else f"sparse or packed tensor ({value.layout})"
        if kind:
            raise FrontendError(
                f"from_torch: {name if is_input else f'the weight {name!r}'} is a {kind}, expected a dense tensor"
            )


def unreadable_reason(tensor: Any) -> str:
    """Name of the kind of a tensor whose elements cannot be read as a dense array; empty for others."""
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return f"quantized tensor ({tensor.dtype})"
    is_lazy = isinstance(tensor, torch_package().nn.parameter.UninitializedTensorMixin)
    if is_lazy or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return f"tensor without elements ({type(tensor).__name__} on {tensor.device})"
    return ""


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])}"


def dimension_names(
    source: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> dict[int, dict[int, str]]:
    """The names that `dynamic_shapes` gives: id of an example tensor -> axis -> name."""
    forward = getattr(source, "forward", None)
    if dynamic_shapes is None or forward is None:
        return {}
    try:
        bound = inspect.signature(forward).bind(*(args or ()), **(kwargs or {})).arguments
    except (TypeError, ValueError):
        return {}
    specs = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(bound, dynamic_shapes, strict=False))
    found: dict[int, dict[int, str]] = {}
    for tensor, names in _named(specs, dict(bound)):
        found.setdefault(id(tensor), {}).update(names)
    return found


def _named(spec: Any, value: Any) -> Iterator[tuple[Any, dict[int, str]]]:
    """Pairs of a tensor and the names of its axes, from a tree of specs and one of values."""
    if spec is None or value is None:
        return
    if hasattr(value, "dim"):
        axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
        names = {axis % max(value.dim(), 1): getattr(dim, "__name__", "") for axis, dim in axes}
        yield value, {axis: name for axis, name in names.items() if name.isidentifier()}
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key in value:
            yield from _named(spec.get(key), value[key])
    elif isinstance(value, (list, tuple)) and isinstance(spec, (list, tuple)):
        for inner_spec, inner in zip(spec, value, strict=False):
            yield from _named(inner_spec, inner)
