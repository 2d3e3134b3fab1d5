"""Ctrl-C or SIGTERM during training: the first finishes the step and saves, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NOTICE = b"\nstopping: the step is finished and saved first (Ctrl-C again stops at once)\n"


class Interrupt:
    """Whether the run was asked to stop, by Ctrl-C or by the caller's own question."""

    def __init__(self, ask: Callable[[], bool] | None) -> None:
        self._ask = ask
        self.pressed = False

    def press(self) -> bool:
        """Note one Ctrl-C; True if it is the first."""
        first, self.pressed = not self.pressed, True
        return first

    def __bool__(self) -> bool:
        return self.pressed or (self._ask is not None and self._ask())


@contextmanager
def watch(ask: Callable[[], bool] | None, *, quiet: bool = False) -> Iterator[Interrupt]:
    """Take Ctrl-C, and SIGTERM likewise, over for a while; in a thread other than the main one only `ask` counts.

    Args:
        ask: a further reason to stop, asked whenever the interrupt is looked at.
        quiet: do not tell on stderr that Ctrl-C was noticed.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C came too late for anyone to notice.
    """
    interrupt = Interrupt(ask)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_signal(_number: int, _frame: object) -> None:
        if not interrupt.press():
            raise KeyboardInterrupt
        if not quiet:
            os.write(2, _NOTICE)  # the signal may have come in the middle of a print, which must not be entered twice

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupt.pressed:
        raise KeyboardInterrupt
