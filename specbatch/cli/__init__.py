"""The command line: parse, load the configuration, call one function. Data goes to stdout, everything else to stderr.

Exit codes: 0 every row has a result, 1 some rows failed, 2 a mistake that is found before weights are read, or a full
disk or memory, 3 an internal error (with a traceback; finished rows are kept), 4 more rows failed than the options
allow (finished rows are kept), 130 interrupted.
"""

from specbatch.cli import estimate, models, report, train_draft
from specbatch.cli.commands import app, main

__all__ = ["app", "estimate", "main", "models", "report", "train_draft"]  # the modules add their commands
