"""What a person sees while things take time."""

import time
from collections.abc import Callable
from operator import itemgetter
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_QUIET_S = 10


class Steps(Protocol):
    """Told when a step begins and ends. Several may run at once."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def end(self, step: str) -> None:
        """A step has succeeded."""

    def waiting(self) -> None:
        """Steps take their time: called now and then, from the thread that waits."""


class SilentSteps:
    """Shows nothing."""

    def begin(self, step: str) -> None:
        """Shows nothing."""

    def end(self, step: str) -> None:
        """Shows nothing."""

    def waiting(self) -> None:
        """Shows nothing."""


class ConsoleSteps:
    """Spinners with the time elapsed on a terminal, while any step runs; one line per begin and end elsewhere.

    There, a line also says which steps are still running when nothing else was said for ten seconds.
    """

    def __init__(self, console: Console, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._spoken = monotonic()
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
        self._began[step] = self._monotonic()
        if self._console.is_terminal:
            self._tasks[step] = self._shown().add_task(step, total=1)
        else:
            self._say(f"{step} ...")

    def end(self, step: str) -> None:
        """Shows that a step is done."""
        elapsed_s = self._monotonic() - self._began.pop(step)
        if self._console.is_terminal:
            self._shown().update(self._tasks.pop(step), completed=1)
        else:
            self._say(f"{step}: done in {elapsed_s:.1f} s")
        if not self._began:
            self._hide()

    def waiting(self) -> None:
        """Shows which steps still run, where there are no spinners and nothing was said for a while."""
        now = self._monotonic()
        if self._began and not self._console.is_terminal and now - self._spoken >= _QUIET_S:
            oldest, began = min(self._began.items(), key=itemgetter(1))
            more = f" and {len(self._began) - 1} more" if len(self._began) > 1 else ""
            self._say(f"  still at it, {now - began:.0f} s: {oldest}{more}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
        self._spoken = self._monotonic()

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
