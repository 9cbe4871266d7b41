"""Parts of the reference kernels."""
