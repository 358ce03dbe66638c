"""Converters of ops of classical machine learning, domain ``ai.onnx.ml``."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import features, linear, ngrams, svm, trees  # noqa: F401
