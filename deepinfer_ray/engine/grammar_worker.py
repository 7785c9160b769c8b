"""The process that compiles grammars; grammar_pool.py starts it.

Knows: xgrammar's compiler, limits of time and memory. Does not know: requests, who asked (grammar_pool.py).
A grammar can cost any amount of time and memory, and native code cannot be interrupted, so every compilation
runs in a fork that is killed at its limit; the imports are paid once, before the first fork. Frames (length,
pickle) come on stdin and go to stdout; the process ends when stdin does.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import selectors
import signal
import struct
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer_ray.engine.grammar_repair import repaired

_LENGTH = struct.Struct("<Q")
_SOURCE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Check failed: .*? is false: )?")
_GRACE_S = 5


class Stream(Protocol):
    """What frames go through: a pipe or a socket, buffered or not."""

    def read(self, size: int = ..., /) -> bytes | None: ...

    def write(self, data: Any, /) -> int | None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """pieces: bytes of each token id, empty where an id has none. stop_ids: tokens that end a completion."""

    pieces: tuple[bytes, ...]
    stop_ids: tuple[int, ...]

    def tokenizer_info(self) -> Any:
        import xgrammar

        return xgrammar.TokenizerInfo(
            list(self.pieces), vocab_size=len(self.pieces), stop_token_ids=list(self.stop_ids)
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One grammar to compile; the fields are `GrammarSpec`'s."""

    number: int
    kind: str
    text: str
    any_whitespace: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a job. status: ok (payload: the serialised grammar), refused (why), timeout, died."""

    number: int
    status: str
    payload: str = ""


def write_frame(stream: Stream, value: object) -> None:
    data = pickle.dumps(value)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:  # an unbuffered stream may take a part
        rest = rest[stream.write(rest) or 0 :]
    stream.flush()


def read_frame(stream: Stream) -> Any:
    """The next value; `EOFError` at the end."""
    (size,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return pickle.loads(_read(stream, size))


def _read(stream: Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# -- compiling --------------------------------------------------------------------------------------------


def compile_job(compiler: Any, job: Job) -> Any:
    """The compiled grammar; `RuntimeError` or `ValueError` with the compiler's reason."""
    import xgrammar

    if job.kind == "json":
        grammar = xgrammar.Grammar.from_json_schema(
            job.text, any_whitespace=job.any_whitespace, strict_mode=True
        )
    elif job.kind == "structural_tag":
        grammar = xgrammar.Grammar.from_structural_tag(job.text)
    elif job.kind == "regex":
        grammar = xgrammar.Grammar.from_regex(job.text)
    else:
        grammar = xgrammar.Grammar.from_ebnf(job.text)
    grammar = repaired(grammar, json_strings=job.kind in ("json", "structural_tag"))
    compiled = compiler.compile_grammar(grammar)
    _check_not_empty(compiled)
    return compiled


def _check_not_empty(compiled: Any) -> None:
    import xgrammar

    vocab = compiled.tokenizer_info.vocab_size
    mask = np.zeros((1, -(-vocab // 32)), np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask, 0)
    if not mask.any():
        raise ValueError("no completion matches it")


def reason_of(error: Exception) -> str:
    """One line of a compiler's error, without its source file and without the grammar it quotes."""
    text = _SOURCE.sub("", str(error).strip())
    text = text.split("The JSON string is")[0].split("\n")[0].strip().rstrip(".")
    return text[:300] or type(error).__name__


def _compile_forever(connection: Stream, info: Any, timeout_s: float, memory_bytes: int) -> None:
    """A fork's life: jobs in, replies out. The alarm ends it should nobody be left to kill it."""
    import xgrammar

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open("/proc/self/statm") as sizes:
        pages = int(sizes.read().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        while True:
            job = read_frame(connection)
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
            said.seek(0)
            said.truncate()
            # A compiler of its own for each job: the cache is the parent's.
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            try:
                payload = compile_job(compiler, job).serialize_json()
                reply = Reply(job.number, "ok", payload)
            except (RuntimeError, ValueError, TypeError, MemoryError, RecursionError) as error:
                reply = Reply(job.number, "refused", reason_of(error))
            said.seek(0)
            warning = re.search(r"Warning: (.*)", said.read().decode(errors="replace"))
            if warning is not None:  # it would leave out what the warning names
                reply = Reply(job.number, "refused", warning[1][:300])
            signal.setitimer(signal.ITIMER_REAL, 0)
            write_frame(connection, reply)


# -- the process ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Fork:
    """One child. socket: both directions. job: what it works on, until when."""

    pid: int
    stream: Stream
    job: Job | None = None
    deadline: float = 0.0


class Server:
    """Hands jobs to forks, at most `workers` at a time, and kills those that take too long."""

    def __init__(self, vocabulary: Vocabulary, workers: int, timeout_s: float, memory_bytes: int) -> None:
        self._info = vocabulary.tokenizer_info()
        self._workers, self._timeout_s, self._memory_bytes = workers, timeout_s, memory_bytes
        self._forks: list[_Fork] = []
        self._queue: deque[Job] = deque()
        self._selector = selectors.DefaultSelector()

    def run(self, source: Stream, sink: Stream) -> None:
        """Until `source` ends. Frames are small, so a readable source has a whole one at once."""
        self._selector.register(source, selectors.EVENT_READ)
        write_frame(sink, "ready")
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is source:
                        self._queue.append(read_frame(source))
                    else:
                        write_frame(sink, self._reply(key.data))
                for fork in [f for f in self._forks if f.job and f.deadline <= time.monotonic()]:
                    assert fork.job is not None
                    self._bury(fork)
                    write_frame(sink, Reply(fork.job.number, "timeout"))
                self._hand_out()
        except EOFError:
            pass
        finally:
            for fork in list(self._forks):
                self._bury(fork)

    def _patience(self) -> float | None:
        deadlines = [fork.deadline for fork in self._forks if fork.job]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _hand_out(self) -> None:
        while self._queue:
            fork = next((fork for fork in self._forks if fork.job is None), None)
            if fork is None:
                if len(self._forks) >= self._workers:
                    return
                fork = self._start()
            fork.job, fork.deadline = self._queue.popleft(), time.monotonic() + self._timeout_s
            write_frame(fork.stream, fork.job)

    def _start(self) -> _Fork:
        import socket

        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                for fork in self._forks:
                    fork.stream.close()
                os.close(0)
                stream = theirs.makefile("rwb", buffering=0)
                _compile_forever(stream, self._info, self._timeout_s, self._memory_bytes)
            finally:
                os._exit(1)
        theirs.close()
        stream = mine.makefile("rwb", buffering=0)
        mine.close()
        fork = _Fork(pid, stream)
        self._forks.append(fork)
        self._selector.register(stream, selectors.EVENT_READ, fork)
        return fork

    def _reply(self, fork: _Fork) -> Reply:
        """What a fork says, or that it died of its job."""
        assert fork.job is not None
        number = fork.job.number
        try:
            reply = read_frame(fork.stream)
        except (EOFError, OSError):
            self._bury(fork)
            return Reply(number, "died")
        fork.job = None
        return reply

    def _bury(self, fork: _Fork) -> None:
        self._selector.unregister(fork.stream)
        fork.stream.close()
        os.kill(fork.pid, signal.SIGKILL)
        os.waitpid(fork.pid, 0)
        self._forks.remove(fork)


def main() -> None:
    workers, timeout_s, memory_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent to handle
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    source = os.fdopen(0, "rb", buffering=0)
    Server(read_frame(source), workers, timeout_s, memory_bytes).run(source, sink)
