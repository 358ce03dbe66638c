"""Attention of CPUs with a paged cache: new keys and values into their pages, scores, softmax and values in one kernel.

`spec` has the parts' sizes and tensors, `heads` norms and rotations, `append` writes pages, `tile` is the attention of
a few rows to a page, `cached_attention` the kernel.
"""
