"""Paged KV cache: refcounted pages, their tensors, and the prefix index that shares pages between requests."""
