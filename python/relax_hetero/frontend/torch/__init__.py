"""PyTorch import: exported programs become Relax; converters of ATen ops use the shapes that torch inferred."""
