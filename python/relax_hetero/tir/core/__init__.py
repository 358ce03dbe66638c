"""Builder, views of parameters, ties, and sharing of work, which every generator of kernels is written with."""
