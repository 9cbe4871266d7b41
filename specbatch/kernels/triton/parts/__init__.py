"""What several Triton kernels share."""
