"""Encodings, layouts and problems (a tensor's role, its storage, a kernel's task), and the registry of resolvers."""

from __future__ import annotations

from .encoding import Encoding
from .expression import Expression
from .packed_layout import PackedLayout
from .problem import ConvProblem, ElementwiseProblem, Epilogue, MatmulProblem, Operand, Window
from .resolver import EncodingResolver, register_resolver, resolver_for

__all__ = [
    "ConvProblem",
    "ElementwiseProblem",
    "Encoding",
    "EncodingResolver",
    "Epilogue",
    "Expression",
    "MatmulProblem",
    "Operand",
    "PackedLayout",
    "Window",
    "register_resolver",
    "resolver_for",
]
