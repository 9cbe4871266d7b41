"""specbatch: offline batch inference with large language models, built around speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.api import LLM as LLM
    from specbatch.api import Report as Report
    from specbatch.api import generate_file as generate_file

__version__ = "0.1.0"
__all__ = ["LLM", "Report", "__version__", "generate_file"]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first used, so that `import specbatch` does not import torch."""
    if name in ("LLM", "Report", "generate_file"):
        from specbatch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
