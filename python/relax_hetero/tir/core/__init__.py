"""What every generator of kernels is written with: the builder, storage, views, vector access, splitting work."""
