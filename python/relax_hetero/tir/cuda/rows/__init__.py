"""Work on rows: softmax, norms, reductions along the last axis."""
