"""`specbatch eval`: known tasks through the file job, their scores and the acceptance of speculation on them.

A task is one YAML file (`configs/evals`). `schema.py` has its options and `load.py` reads it. `data.py` finds its rows,
`prompts.py` writes their prompts, and `runner.py` has the file job answer them. `filters.py` and `metrics.py` score the
answers, and `sandbox.py` runs generated programs. `command.py` is the command.
"""
