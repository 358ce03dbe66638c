"""What tensors are for and how they are stored: encodings, packed layouts, and the resolvers of devices."""

from __future__ import annotations

from .encoding import Encoding
from .expression import Expression
from .packed_layout import PackedLayout
from .problem import ElementwiseProblem, Epilogue, MatmulProblem, Operand
from .resolver import EncodingResolver, register_resolver, resolver_for
from .resolvers import register_resolvers as _register_resolvers

__all__ = [
    "ElementwiseProblem",
    "Encoding",
    "EncodingResolver",
    "Epilogue",
    "Expression",
    "MatmulProblem",
    "Operand",
    "PackedLayout",
    "register_resolver",
    "resolver_for",
]

_register_resolvers()
