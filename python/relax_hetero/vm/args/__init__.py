"""Arguments of calls, checked and placed on devices; results, as tuples of tensors or in the caller's buffers."""
