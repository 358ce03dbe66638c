"""What passes do to a module, step by step: the module after each, the differences, the times."""
