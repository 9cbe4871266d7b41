"""Entry point of the `specbatch` command and of `python -m specbatch`."""

import signal

from specbatch.signals import end_at_once


def main() -> None:
    # These handlers are set from the first import to the end of the process. Commands set others while they run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
    from specbatch.cli import main as run

    run()


if __name__ == "__main__":
    main()
