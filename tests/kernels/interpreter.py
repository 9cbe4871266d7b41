"""Triton's interpreter, in a third of the time.

It replaces the functions of `triton.language` at each launch, and again at each call of one device function by another:
hundreds of times within a launch, where once is enough. It computes each sum of integers in 64 bits, too, for an
assertion that runs only with its option `debug`. And it makes a dict of all types to find one of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any


def speed_up() -> None:
    """Leave out work without a result. A version of Triton with other internals stays as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "InterpretedFunction", "interpreter_builder", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch(whole)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    find, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: find(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
