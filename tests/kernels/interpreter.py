"""Triton's interpreter, in half the time.

It replaces the functions of `triton.language` at each launch, and again at each call of one device function by another:
hundreds of times within a launch, where once is enough.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def speed_up() -> None:
    """Replace `triton.language` once for each launch. A version of Triton with other internals stays as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "InterpretedFunction")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch(whole)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
