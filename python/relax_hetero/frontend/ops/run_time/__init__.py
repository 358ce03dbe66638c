"""Numbers that only a call knows, as inputs of a node: axes, sizes, pads."""
