"""From a PyTorch module to an exported program of the ops that this library converts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...artifact.what_reads import found
from ...errors import FrontendError

if TYPE_CHECKING:
    import torch

# Ops that torch would decompose, and that stay whole: kernels of this library compute them, or find them more easily.
_KEPT = frozenset(
    "linear layer_norm group_norm instance_norm rms_norm gelu silu hardswish hardsigmoid mish softplus elu leaky_relu "
    "scaled_dot_product_attention einsum matmul softmax log_softmax upsample_nearest1d upsample_nearest2d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_bilinear2d_aa pixel_shuffle adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d "
    "max_pool1d max_pool2d max_pool3d grid_sampler prelu embedding addmm baddbmm tril triu log1p expm1 "
    "split split_with_sizes unbind stack index_select cumsum reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d pad dropout native_dropout lstm gru rnn_tanh rnn_relu".split()
)


def torch_package() -> Any:
    """PyTorch.

    Raises
    ------
    FrontendError: If it is not installed.
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
    FrontendError: If the arguments do not fit each other, or torch cannot export the module.
    """
    torch = torch_package()
    if isinstance(source, torch.export.ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise FrontendError(
                "from_torch: an ExportedProgram has its inputs already; example_args, example_kwargs and "
                "dynamic_shapes are for modules"
            )
        program = source
    elif isinstance(source, torch.nn.Module):
        program = _export(torch, source, args, kwargs, dynamic_shapes)
    else:
        raise FrontendError(
            f"rh.from_torch: {found(source, 'rh.from_torch')}; expected a torch.nn.Module or ExportedProgram"
        )
    table = torch.export.default_decompositions()
    for op in [op for op in table if op._schema.name.split("::")[1] in _KEPT]:
        table.pop(op)
    try:
        return program.run_decompositions(table)
    except Exception as error:
        raise FrontendError(f"torch cannot decompose the exported program: {_first_lines(error)}") from error


def _export(torch: Any, module: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> Any:
    if args is None and kwargs is None:
        raise FrontendError("from_torch: a module needs example_args (or example_kwargs) to be exported with")
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list, type(None))):
        raise FrontendError(f"from_torch: example_args is a {type(args).__name__}, expected a tuple of arguments")
    try:
        with torch.no_grad():
            return torch.export.export(
                module, tuple(args or ()), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        raise FrontendError(f"torch cannot export {type(module).__name__}: {_first_lines(error)}") from error


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
