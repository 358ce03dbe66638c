"""Dynamic axes, sizes and pads as inputs of a node."""
