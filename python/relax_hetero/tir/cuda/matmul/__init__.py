"""Matrix products on GPUs."""
