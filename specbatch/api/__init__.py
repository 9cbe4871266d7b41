"""The Python interface: `LLM` and `AsyncLLM` for rows in memory, `generate_file` for files. All do what the command
does."""
