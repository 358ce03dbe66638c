"""PyTorch import: exported programs become Relax, each ATen op by a converter that knows the shapes torch found."""
