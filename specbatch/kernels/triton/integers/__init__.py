"""GEMMs with weights of whole numbers, which are dequantised inside the kernel."""
