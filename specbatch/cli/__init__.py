"""The command line: parse, load the configuration, call one function. Data goes to stdout, everything else to stderr.

Exit codes: 0 all fine, 1 some rows failed, 2 a mistake found before any model is loaded, or a full disk, 3 an error
inside specbatch (with a traceback; finished rows are kept), 130 interrupted.
"""

from specbatch.cli.commands import app, main

__all__ = ["app", "main"]
