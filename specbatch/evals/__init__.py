"""`specbatch eval`: known tasks through the file job, their scores and the acceptance of speculation on them.

A task is one YAML file (`tasks/`). `schema.py` says what it may hold and `load.py` reads it; `data.py` finds its rows,
`prompts.py` writes their prompts, `filters.py` and `metrics.py` score the answers, `sandbox.py` runs generated code;
`command.py` is the command, over `pipeline.command.generate_file`.
"""
