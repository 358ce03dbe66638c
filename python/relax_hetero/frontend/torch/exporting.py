"""Export of a PyTorch module to a program of convertible ops, and the names of its nodes, outputs and dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...artifact.file_hints import describe_value
from ...errors import FrontendError, pip_install
from ..onnx.node_names import NodeInfo

if TYPE_CHECKING:
    import torch


_SELF = "L['self']"


def op_name(node: Any) -> str:
    """Name of an FX node's op, without its namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


class NodeNames:
    """Assigns unique names to nodes, from the path of their module: ``encoder.layer.3.output.dense.linear``."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def info(self, node: Any) -> NodeInfo:
        """Name an FX node; the aliases are its op, and the paths and classes of the enclosing modules."""
        stack = [(_module_path(path), kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]
        op, path = op_name(node), stack[-1][0] if stack else ""
        base = f"{path}.{op.lstrip('_')}" if path else op.lstrip("_")
        count = self._counts.get(base, 0)
        self._counts[base] = count + 1
        name = base
        while count and name in self._counts:
            name = f"{base}_{count}"
            count += 1
        self._counts.setdefault(name, 1)
        paths = [inner for inner, _ in stack if inner]
        kinds = [(kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1] for _, kind in stack]
        aliases = (op, f"aten.{op}", *dict.fromkeys(paths), *dict.fromkeys(kinds))
        return NodeInfo(name, aliases, op, "", "")


def _module_path(path: str) -> str:
    path = path.removeprefix(_SELF)
    return path.replace("['", ".").replace("']", "").replace("._modules", "").strip(".")


def output_names(program: Any) -> list[str]:
    """Name each leaf of the module's results by its keys, field names and indices."""
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


# Ops that torch must not decompose, because this library converts them directly or fuses them more easily.
# torch 2.13 decomposes the last one incorrectly; without decomposition it is refused.
_UNDECOMPOSED = frozenset(
    "linear layer_norm group_norm instance_norm rms_norm gelu silu hardswish hardsigmoid mish softplus elu leaky_relu "
    "scaled_dot_product_attention einsum matmul softmax log_softmax upsample_nearest1d upsample_nearest2d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa pixel_shuffle adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d "
    "max_pool1d max_pool2d max_pool3d grid_sampler prelu embedding addmm baddbmm tril triu log1p expm1 "
    "split split_with_sizes unbind stack index_select cumsum reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d pad dropout native_dropout lstm gru rnn_tanh rnn_relu one_hot index_add index_copy "
    "multilabel_margin_loss_forward".split()
)

_DECOMPOSED = frozenset("dist ldexp".split())  # core ATen ops that torch decomposes for its own compiler only

# Argument -> value for which a random op is deterministic.
_DETERMINISTIC_ARGUMENTS = {"train": False, "training": False, "p": 0, "dropout_p": 0, "dropout": 0, "num_layers": 1}


def torch_package() -> Any:
    """Import PyTorch. Raises FrontendError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise FrontendError(f"rh.from_torch needs PyTorch, which is not installed; {pip_install('torch')}") from error
    return torch


def exported_program(
    source: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Export a module, or take an exported program, and decompose it to a functional program of few ops.

    Raises FrontendError if the arguments do not match, or torch cannot export the module.
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
    undecomposed = _UNDECOMPOSED - {"lstm"} if any(map(_is_projected_lstm, _calls(program))) else _UNDECOMPOSED
    for op in [op for op in table if op._schema.name.split("::")[1] in undecomposed]:
        table.pop(op)
    for op, decomposition in torch._decomp.decomposition_table.items():
        if getattr(op, "__name__", "").partition(".")[0] in _DECOMPOSED:
            table[op] = decomposition
    table.update(fast_path_decompositions(torch))
    try:
        program = program.run_decompositions(table)
    except Exception as error:
        raise FrontendError(f"torch cannot decompose the exported program: {_first_lines(error)}") from error
    for graph in _graphs(program):  # removes unused random ops
        graph.eliminate_dead_code(lambda node: node.is_impure() and not _is_random(node))
    _refuse_random(program)
    return program


def _graphs(program: Any) -> list[Any]:
    """The graph of a program and all nested graphs."""
    return [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]


def _calls(program: Any) -> list[Any]:
    """All nodes that call an op."""
    return [node for graph in _graphs(program) for node in graph.nodes if node.op == "call_function"]


def _is_projected_lstm(node: Any) -> bool:
    """Return whether a node is an LSTM with projections, which ONNX lacks, so that torch has to unroll it."""
    if not str(node.target).startswith("aten.lstm.input"):
        return False
    layers, directions = _argument(node, "num_layers"), 2 if _argument(node, "bidirectional") else 1
    return len(_argument(node, "params")) > (4 if _argument(node, "has_biases") else 2) * layers * directions


def _argument(node: Any, *names: str) -> Any:
    """The value of a node's first argument with one of these names, or None."""
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name in names:
            return (
                node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
    return None


def _is_random(node: Any) -> bool:
    """Return whether a node with its arguments draws random numbers."""
    if torch_package().Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not any(_argument(node, name) == value for name, value in _DETERMINISTIC_ARGUMENTS.items())


def _refuse_random(program: Any, is_candidate: Callable[[Any], bool] = lambda node: True) -> None:
    """Refuse random ops, whose numbers a compiled model would repeat in every call.

    Ops of modules in training mode are checked before decomposition, which hides them.
    """
    names = NodeNames()
    random = [node for node in _calls(program) if _is_random(node) and is_candidate(node)]
    draws = [f"node {names.info(node).name!r}: {node.target}" for node in random]
    if draws:
        raise FrontendError(
            f"the module draws random numbers, which a compiled model would repeat in every call: {'; '.join(draws)}; "
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

    numbers_before, numbers_after = _number_attributes(module), {}
    hook = module.register_forward_hook(lambda *_: numbers_after.update(_number_attributes(module)))
    try:
        program = export()
    except Exception as error:
        raise FrontendError(f"torch cannot export {type(module).__name__}: {_first_lines(error)}") from error
    finally:
        hook.remove()
    changed = {key: value for key, value in numbers_after.items() if numbers_before.get(key, value) != value}
    if changed and _exports_differently(module, program, export, numbers_before, changed):
        names = ", ".join(repr(".".join(filter(None, key))) for key in changed)
        raise FrontendError(
            f"the module changes {names} when it runs, and computes something else in the next call; a compiled model "
            "cannot: take the number as an input, and return the new one"
        )
    return program


_Numbers: TypeAlias = "dict[tuple[str, str], bool | int | float]"


def _number_attributes(module: Any) -> _Numbers:
    """(path of a submodule, name of an attribute) -> value, for all numeric attributes."""
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float))
    }


def _exports_differently(
    module: Any, program: Any, export: Callable[[], Any], before: _Numbers, changed: _Numbers
) -> bool:
    """Return whether a module exports differently after its numbers changed, unlike one with a cache filled once."""

    def assign(numbers: _Numbers) -> None:
        for path, name in changed:
            vars(module.get_submodule(path))[name] = numbers[path, name]

    assign(changed)
    try:
        return str(export().graph) != str(program.graph)
    except Exception:  # the other state of the module is the old one
        return False
    finally:
        assign(before)


def _check_storage(torch: Any, module: Any, args: Any, kwargs: Any) -> None:
    """Refuse inputs that torch cannot export, and weights whose elements cannot be read."""
    tree = torch.utils._pytree
    leaves, _ = tree.tree_flatten_with_path({"example_args": tuple(args or ()), "example_kwargs": dict(kwargs or {})})
    inputs = [(f"{path[0].key}{tree.keystr(path[1:])}", value) for path, value in leaves]
    weights = [*module.named_parameters(), *module.named_buffers()]
    for is_input, (name, value) in [*((True, pair) for pair in inputs), *((False, pair) for pair in weights)]:
        if not isinstance(value, torch.Tensor):
            continue
        kind = unreadable_reason(value)
        if is_input and not kind.startswith(("nested", "quantized")):  # only the shapes of example arguments matter
            kind = "" if value.layout == torch.strided else f"sparse or packed tensor ({value.layout})"
        if kind:
            raise FrontendError(
                f"from_torch: {name if is_input else f'the weight {name!r}'} is a {kind}, expected a dense tensor"
            )


def unreadable_reason(tensor: Any) -> str:
    """The kind of a tensor whose elements cannot be read as a dense array; empty for other tensors."""
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
    """Names in `dynamic_shapes`: id of an example tensor -> axis -> name."""
    forward = getattr(source, "forward", None)
    if dynamic_shapes is None or forward is None:
        return {}
    try:
        bound = inspect.signature(forward).bind(*(args or ()), **(kwargs or {})).arguments
    except (TypeError, ValueError):
        return {}
    specs = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(bound, dynamic_shapes, strict=False))
    names_by_tensor: dict[int, dict[int, str]] = {}
    for tensor, names in _axis_names(specs, dict(bound)):
        names_by_tensor.setdefault(id(tensor), {}).update(names)
    return names_by_tensor


def _axis_names(spec: Any, value: Any) -> Iterator[tuple[Any, dict[int, str]]]:
    """Pairs of a tensor and the names of its axes, from parallel trees of specs and values."""
    if spec is None or value is None:
        return
    if hasattr(value, "dim"):
        axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
        names = {axis % max(value.dim(), 1): getattr(dim, "__name__", "") for axis, dim in axes}
        yield value, {axis: name for axis, name in names.items() if name.isidentifier()}
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key in value:
            yield from _axis_names(spec.get(key), value[key])
    elif isinstance(value, (list, tuple)) and isinstance(spec, (list, tuple)):
        for inner_spec, inner in zip(spec, value, strict=False):
            yield from _axis_names(inner_spec, inner)


PER_KEY = 1  # type of a mask (batch, keys); others have the shape of the scores, or (queries, keys)


def fast_path_decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Functions by op, for `torch.export.ExportedProgram.run_decompositions`."""
    functional = torch.nn.functional

    def attention(
        query: Any,
        key: Any,
        value: Any,
        embed_dim: int,
        num_head: int,
        qkv_weight: Any,
        qkv_bias: Any,
        proj_weight: Any,
        proj_bias: Any,
        mask: Any = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Any, Any]:
        parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        width = embed_dim // num_head
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (num_head, width)).transpose(1, 2)
            for x, weight, bias in parts
        )
        if mask is not None:
            mask = mask[:, None, None, :] if mask_type == PER_KEY else mask
            mask = torch.where(mask, float("-inf"), 0.0).to(q.dtype) if mask.dtype == torch.bool else mask
        if need_weights:
            scores = (q * width**-0.5) @ k.transpose(-1, -2)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed, weights = weights @ v, weights.mean(1) if average_attn_weights else weights
        else:
            mixed, weights = functional.scaled_dot_product_attention(q, k, v, mask), query.new_empty(0)
        return functional.linear(mixed.transpose(1, 2).flatten(-2), proj_weight, proj_bias), weights

    def encoder_layer(
        src: Any,
        embed_dim: int,
        num_heads: int,
        qkv_weight: Any,
        qkv_bias: Any,
        proj_weight: Any,
        proj_bias: Any,
        use_gelu: bool,
        norm_first: bool,
        eps: float,
        norm_weight_1: Any,
        norm_bias_1: Any,
        norm_weight_2: Any,
        norm_bias_2: Any,
        ffn_weight_1: Any,
        ffn_bias_1: Any,
        ffn_weight_2: Any,
        ffn_bias_2: Any,
        mask: Any = None,
        mask_type: int | None = None,
    ) -> Any:
        def attend(x: Any) -> Any:
            layer = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
            return attention(x, x, x, *layer, mask, need_weights=False, mask_type=mask_type)[0]

        def feed_forward(x: Any) -> Any:
            hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
            hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
            return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

        def norm(x: Any, weight: Any, bias: Any) -> Any:
            return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

        if norm_first:
            x = src + attend(norm(src, norm_weight_1, norm_bias_1))
            return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
        x = norm(src + attend(src), norm_weight_1, norm_bias_1)
        return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)

    ops = torch.ops.aten
    return {
        ops._native_multi_head_attention.default: attention,
        ops._transformer_encoder_layer_fwd.default: encoder_layer,
    }
