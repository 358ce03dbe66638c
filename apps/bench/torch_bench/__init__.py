"""Networks defined in PyTorch, for apps/bench/torch_bench/torch_models.py."""
