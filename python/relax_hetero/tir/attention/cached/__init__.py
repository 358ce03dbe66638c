"""Attention with a paged KV cache on CPUs: appending to pages, scores, softmax and values in one kernel.

`spec` has sizes and tensors, `heads` norms and rotary embeddings, `cached_attention` the kernel.
"""
