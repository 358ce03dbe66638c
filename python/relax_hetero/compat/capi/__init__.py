"""Modules whose names programs import from ``onnxruntime.capi``."""
