"""What a person sees while things take time."""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps(Protocol):
    """Told when a step begins and ends. Several may run at once."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def end(self, step: str) -> None:
        """A step has succeeded."""


class SilentSteps:
    """Shows nothing."""

    def begin(self, step: str) -> None:
        """Shows nothing."""

    def end(self, step: str) -> None:
        """Shows nothing."""


class ConsoleSteps:
    """Spinners with the time elapsed on a terminal, while any step runs; one line per begin and end elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide()

    def begin(self, step: str) -> None:
        """Shows that a step is running."""
        self._began[step] = time.monotonic()
        if self._console.is_terminal:
            self._tasks[step] = self._shown().add_task(step, total=1)
        else:
            self._console.print(f"{step} ...", highlight=False)

    def end(self, step: str) -> None:
        """Shows that a step is done."""
        elapsed_s = time.monotonic() - self._began.pop(step)
        if self._console.is_terminal:
            self._shown().update(self._tasks.pop(step), completed=1)
        else:
            self._console.print(f"{step}: done in {elapsed_s:.1f} s", highlight=False)
        if not self._began:
            self._hide()

    def _shown(self) -> Progress:
        if self._progress is None:
            columns = SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn()
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self._progress

    def _hide(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
