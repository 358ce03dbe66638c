"""Converters of single ONNX ops that are tried before stock TVM's, by op type."""

from __future__ import annotations

from typing import Any

CONVERTERS: dict[str, Any] = {}
