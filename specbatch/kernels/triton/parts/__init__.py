"""The shared parts of several Triton kernels."""
