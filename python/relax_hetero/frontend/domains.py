"""Domains of ONNX operators."""

from __future__ import annotations

# Domains whose name means "the ONNX standard".
STANDARD_DOMAINS = ("", "ai.onnx")
