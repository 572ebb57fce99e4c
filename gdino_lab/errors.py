"""What is the user's to mend: shown as one message without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ConfigurationError(Exception):
    """Settings or inputs that cannot work, every complaint at once. Exit code 2: nothing was started or written."""

    def __init__(self, complaints: str | Iterable[str]):
        self.complaints = [complaints] if isinstance(complaints, str) else list(complaints)
        super().__init__("\n".join(self.complaints))


class NotSaved(OSError):
    """A checkpoint could not be written; the one before it is untouched.

    Args:
        folder: the run's checkpoints/.
        errno: why, where the system said so.
        echo: whether this rank only heard that another could not.
    """

    def __init__(self, message: str, folder: Path, errno: int | None = None, echo: bool = False):
        super().__init__(message)
        self.folder, self.errno, self.echo = folder, errno, echo


class Unproved(ConfigurationError):
    """A checkpoint's model does not answer or score as the checkpoint says; nothing was trained."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """' Did you mean X?' for the closest of `allowed`, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
