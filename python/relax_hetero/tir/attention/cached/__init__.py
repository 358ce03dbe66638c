"""Attention with a paged KV cache on CPUs: a source of keys and values, appending to pages, and units of work.

`spec` has sizes and tensors, `heads` norms and rotary embeddings, `cached_attention` the kernel and pages as a source.
"""
