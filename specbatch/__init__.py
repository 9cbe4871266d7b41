"""specbatch: offline batch inference with large language models, built around speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.api.async_llm import AsyncLLM as AsyncLLM
    from specbatch.api.batch_map import BatchMap as BatchMap
    from specbatch.api.file_job import Report as Report
    from specbatch.api.file_job import generate_file as generate_file
    from specbatch.api.llm import LLM as LLM
    from specbatch.api.results import Result as Result
    from specbatch.api.results import Results as Results

_MODULES = {
    "AsyncLLM": "specbatch.api.async_llm",
    "BatchMap": "specbatch.api.batch_map",
    "LLM": "specbatch.api.llm",
    "Report": "specbatch.api.file_job",
    "Result": "specbatch.api.results",
    "Results": "specbatch.api.results",
    "generate_file": "specbatch.api.file_job",
}
__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BatchMap", "Report", "Result", "Results", "__version__", "generate_file"]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first used, so that `import specbatch` does not import torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
