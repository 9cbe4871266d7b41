"""Paged KV cache: refcounted pages, the tensors behind them, and the prefix index that shares them across rows."""
