"""Converters of ops of classical machine learning, domain ``ai.onnx.ml``."""

from __future__ import annotations

# Importing a module registers its converters.
from . import features, linear, ngrams, svm, trees  # noqa: F401
