"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Shows one run: `with Display(...) as display: display.update(...)`.

    Args:
        name: what is trained, for the head of the line.
        total: steps of the run.
        quiet: show nothing.
        console: where to; standard error if None.
    """

    def __init__(self, name: str, total: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.name, self.total, self.quiet = name, total, quiet
        self.console = console or Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._first: tuple[int, float] | None = None  # (step, time) when the first update came
        self._bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task(escape(name), total=total, figures="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, markup=False)

    def preparing(self, stage: str, share: float) -> None:
        """How far the tokenizer or the token file is."""
        if self._bar:
            self._bar.update(self._task, figures=f"making the {stage}: {share:.0%}")
        elif share == 0.0:
            self.say(f"{self.name}  making the {stage}")

    def waiting(self, reason: str) -> None:
        """Why nothing will be seen for a while."""
        if self._bar:
            self._bar.update(self._task, figures=reason)
        else:
            self.say(f"{self.name}  {reason}")

    def update(self, step: int, *, loss: float, rate: float, tokens_per_s: float, log: bool) -> None:
        """The state after `step` steps; without a terminal a line is printed where `log` is true."""
        figures = f"loss {loss:.4f}  lr {rate:.2e}  {tokens_per_s:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, figures=figures)
        elif log:
            self.say(f"{self.name}  step {step}/{self.total}  {figures}  {self._left(step)} left")

    def _left(self, step: int) -> str:
        """Time to the end at the pace since the first update, as minutes:seconds."""
        now = time.monotonic()
        first_step, first_time = self._first = self._first or (step, now)
        pace = (now - first_time) / (step - first_step) if step > first_step else 0.0
        minutes, seconds = divmod(round(pace * (self.total - step)), 60)
        return f"{minutes}:{seconds:02d}" if pace else "-:--"
