"""Whose CPU time it is, where many services share one thread: each step of each task belongs to one account.

A task belongs to the account in which it was made. What it awaits may belong to another one (`Meter.within`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

OTHERS = "others"
"""The account of what nobody claims: the loop, the clients, the engines."""


class Meter:
    """CPU seconds of this thread by account."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self._stack = [OTHERS]
        self._since = time.thread_time()

    @property
    def account(self) -> str:
        """The account that pays now."""
        return self._stack[-1]

    def reset(self) -> None:
        """Begins anew."""
        self.cpu_s.clear()
        self._since = time.thread_time()

    @contextmanager
    def paying(self, account: str) -> Iterator[None]:
        """Has another account pay for a while in which nothing is awaited."""
        self.enter(account)
        try:
            yield
        finally:
            self.leave()

    def within(self, account: str, work: Coroutine[Any, Any, T]) -> "Steps[T]":
        """Returns the same work, to be awaited, for which another account pays."""
        return Steps(self, account, work)

    def enter(self, account: str) -> None:
        """Another account pays from now on."""
        self._settle()
        self._stack.append(account)

    def leave(self) -> None:
        """The one before pays again."""
        self._settle()
        self._stack.pop()

    def pay_for_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the tasks of a loop belong to the accounts in which they are made."""

        def task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
            return asyncio.Task(Steps(self, self.account, work), loop=loop, **options)

        loop.set_task_factory(task)

    def _settle(self) -> None:
        now = time.thread_time()
        self.cpu_s[self._stack[-1]] += now - self._since
        self._since = now


class Steps(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine of which each step is paid for by one account."""

    def __init__(self, meter: Meter, account: str, work: Coroutine[Any, Any, T]) -> None:
        self._meter = meter
        self._account = account
        self._work = work

    def send(self, value: Any) -> Any:
        """Takes the next step."""
        self._meter.enter(self._account)
        try:
            return self._work.send(value)
        finally:
            self._meter.leave()

    def throw(self, kind: Any, error: Any = None, trace: TracebackType | None = None) -> Any:
        """Takes the next step, which begins with an error."""
        self._meter.enter(self._account)
        try:
            return self._work.throw(kind if error is None else error)
        finally:
            self._meter.leave()

    def close(self) -> None:
        """Ends it."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def __iter__(self) -> "Steps[T]":
        return self

    def __next__(self) -> Any:
        return self.send(None)
