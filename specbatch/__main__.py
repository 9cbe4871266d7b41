"""`python -m specbatch`, and the entry point of the `specbatch` command."""

import signal

from specbatch.signals import end_at_once


def main() -> None:
    # From the first import to the end of the process. Commands set other handlers while they run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
    from specbatch.cli import main as run

    run()


if __name__ == "__main__":
    main()
