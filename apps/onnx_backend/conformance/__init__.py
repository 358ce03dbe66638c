"""A runner of ONNX's own backend suite, case by case, for stock TVM and relax_hetero."""
