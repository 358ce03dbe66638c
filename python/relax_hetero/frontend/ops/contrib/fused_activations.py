"""The activation that ONNX Runtime's optimizer joins to a product or convolution, named by attributes."""

from __future__ import annotations

from tvm import relax

from ..node import Node
from ..table import convert_node

# Activations, their parameters in the order of `activation_params`; the names are the standard op's attributes.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
# FusedGemm names parameters one by one.
_NAMED = {name: f"activation_{name}" for name in ("alpha", "beta", "gamma")}


def activated(node: Node, value: relax.Expr) -> relax.Expr:
    """The value after the activation that the node's attribute `activation` names; as it is where there is none.

    Raises
    ------
    FrontendError
        If the activation is unknown, or has another number of parameters.
    """
    name = node.attribute("activation", "")
    if not name:
        return value
    if name not in _PARAMETERS:
        raise node.refusal(f"activation {name!r} cannot be imported; expected one of {', '.join(_PARAMETERS)}")
    given = [float(number) for number in node.attribute("activation_params", ())]
    named = {key: node.attribute(attribute) for key, attribute in _NAMED.items() if attribute in node.attributes}
    if given and len(given) != len(_PARAMETERS[name]):
        raise node.refusal(f"activation {name!r} has {len(given)} parameters, expected {len(_PARAMETERS[name])}")
    attributes = dict(zip(_PARAMETERS[name], given, strict=False)) or named
    if name == "Clip":  # of an opset whose bounds are attributes
        return convert_node(node.as_op(name, [value], 6, **attributes))
    return convert_node(node.as_op(name, [value], max(node.opset, 14), **attributes))
