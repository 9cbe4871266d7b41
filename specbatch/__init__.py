"""specbatch: offline batch inference with large language models, built around speculative decoding."""

__version__ = "0.1.0"
