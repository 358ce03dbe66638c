"""ONNX models: read, checked, named, imported node by node."""
