"""Checks of what a model's files say."""

from specbatch.models.checks import first_names


def test_names_in_messages_have_no_control_characters() -> None:
    """A name of a downloaded file would otherwise write lines and colours to the terminal."""
    assert first_names(["plain", "a\nb\x1b[31m", "c"], limit=2) == r"plain, 'a\nb\x1b[31m' and 1 more"
