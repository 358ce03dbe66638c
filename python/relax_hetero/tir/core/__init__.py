"""What every generator of kernels is written with: the builder, views of parameters, ties, and sharing of work."""
