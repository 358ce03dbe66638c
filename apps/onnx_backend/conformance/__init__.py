"""Runs ONNX's own backend suite, case by case, against stock TVM and relax_hetero."""
