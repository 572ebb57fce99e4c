"""gdino-lab doctor: what this machine can do, and the cure for what it cannot."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from rich.text import Text

    from gdino_lab.doctor import Finding

COLUMNS = ["what", "verdict", "found", "cure"]
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
# Columns of a terminal that are not for what was found and its cure.
FRAME = 40


def run(config: DictConfig) -> int:
    from rich.text import Text

    from gdino_lab.doctor import examine
    from gdino_lab.progress import format_table
    from gdino_lab.tasks.protocol import Table

    findings = examine()
    count = {verdict: sum(each.verdict == verdict for each in findings) for verdict in STYLES}
    note = f"{count['ok']} ok, {count['warning']} warning(s), {count['problem']} problem(s)"
    room = max(60, min(140, shutil.get_terminal_size((140, 24)).columns - FRAME))
    rows = [row_of(finding, room) for finding in findings]
    columns = [Text(name, justify="left") for name in COLUMNS]
    print(format_table(Table("What this machine can do", columns, rows, note)))
    return 1 if count["problem"] else 0


def row_of(finding: Finding, room: int) -> list[str | Text]:
    """Cells for the table; `room`: columns for what was found and its cure. Prose reads from the left."""
    from rich.text import Text

    found, cure = (
        Text("\n".join(textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)), justify="left")
        for text, width in ((finding.detail, room * 3 // 5), (finding.cure, room * 2 // 5))
    )
    return [finding.subject, Text(finding.verdict, STYLES[finding.verdict], justify="left"), found, cure]
