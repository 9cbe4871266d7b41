"""`python -m specbatch`, and the entry point of the `specbatch` command."""

from specbatch.signals import end_at_once, on_signals


def main() -> None:
    with on_signals(end_at_once):  # from the first import on
        from specbatch.cli import main as run

        run()


if __name__ == "__main__":
    main()
