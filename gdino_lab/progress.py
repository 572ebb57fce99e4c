"""What a person sees while a run goes on: a live line on a terminal, tables at the end."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable

from gdino_lab.tasks.protocol import Table


class Progress:
    """Epoch, step, loss, lr, images/s and memory in one live line; nothing where output is no terminal."""

    def __init__(self, total_steps: int, done: int, shown: bool):
        console = Console()
        self._bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=done, epoch="-", numbers="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, epoch: int, row: dict[str, float] | None = None) -> None:
        """One step done; `row` renews the numbers."""
        fields = {"epoch": epoch + 1}
        if row is not None:
            fields["numbers"] = (
                f"loss {row['loss']:.4f}  lr {row['lr']:.1e}  {row['images_per_s']:.1f} images/s  "
                f"{row['memory_gib']:.2f} GiB"
            )
        self._bar.update(self._task, advance=1, **fields)


def format_table(table: Table, width: int | None = None) -> str:
    """The table as text, as wide as it needs, or as `width` columns."""
    grid = RichTable(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for number, column in enumerate(table.columns):
        grid.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*row)
    console = Console(width=width or 1000)
    console = Console(width=width or max(100, Measurement.get(console, console.options, grid).maximum))
    with console.capture() as captured:
        console.print(grid)
    return captured.get()
