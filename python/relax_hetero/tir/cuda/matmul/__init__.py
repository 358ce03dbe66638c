"""Matrix products on GPUs: by wgmma, by mma.sync, by plain threads, and for few rows."""
