"""Names of an exported program: of nodes by the modules they are in, of outputs by the structure they come back in."""

from __future__ import annotations

from typing import Any

from ..onnx.node_names import NodeInfo

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
