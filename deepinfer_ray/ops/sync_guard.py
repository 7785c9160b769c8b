"""Keeps the host from waiting for the device where it must not: `forbid_sync()` and `allow_sync()`.

Knows: torch's sync debug mode, which raises at every copy or read that would block, and how threads share it
(spec/engine.md §9.4). Does not know: steps; waits on events, which the mode does not see and which are the
engine's one legitimate way to wait.

The mode belongs to the whole process, so a small arbiter keeps a stack of intents a thread: as long as any
thread's innermost intent is "allow", nothing raises; otherwise one "forbid" anywhere makes blocking calls
raise; with no intent left, the mode is what it was before the first one. Without a CUDA context it does
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Intent = Literal["allow", "forbid"]
Mode = int | str

DEFAULT, ERROR = 0, 2
"""Values of torch's debug mode: silent, raise."""


class SyncArbiter:
    """The stacks of intents of all threads, and the one mode that follows from them.

    get_mode, set_mode: the process-wide switch; set_mode is called only when the mode changes.
    """

    def __init__(self, get_mode: Callable[[], int], set_mode: Callable[[Mode], None]) -> None:
        self._get_mode, self._set_mode = get_mode, set_mode
        self._lock = threading.Lock()
        self._stacks: dict[int, list[Intent]] = {}
        self._baseline = DEFAULT
        self._current: int | None = None

    @contextmanager
    def hold(self, intent: Intent) -> Iterator[None]:
        """The calling thread's innermost intent is `intent` inside. Also usable as a decorator."""
        thread = threading.get_ident()
        with self._lock:
            if not self._stacks:
                self._baseline = self._current = self._get_mode()
            self._stacks.setdefault(thread, []).append(intent)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                stack = self._stacks[thread]
                stack.pop()
                if not stack:
                    del self._stacks[thread]
                self._apply()

    def _apply(self) -> None:
        innermost = {stack[-1] for stack in self._stacks.values()}
        mode = DEFAULT if "allow" in innermost else ERROR if "forbid" in innermost else self._baseline
        if mode != self._current:
            self._set_mode(mode)
            self._current = mode


_ARBITER = SyncArbiter(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode)


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Blocking device calls of any thread raise `RuntimeError` inside; nests; also a decorator."""
    if not torch.cuda.is_initialized():
        yield
        return
    with _ARBITER.hold("forbid"):
        yield


@contextmanager
def allow_sync() -> Iterator[None]:
    """Blocking device calls are legitimate inside, whatever encloses this; nests; also a decorator."""
    if not torch.cuda.is_initialized():
        yield
        return
    with _ARBITER.hold("allow"):
        yield
