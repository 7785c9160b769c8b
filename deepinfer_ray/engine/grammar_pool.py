"""Grammars of a rank: compiled beside the engine, kept by hash.

Knows: the compiling process (grammar_worker.py), the cache and its bytes, what each failure is called. Does
not know: sequences, matchers' states. The engine's thread calls; two threads of the pool talk to the process.
A grammar that failed is kept, too: a thousand rows with the same bad schema cost one compilation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from deepinfer_ray.engine.grammar_spec import GrammarSpec
from deepinfer_ray.engine.grammar_worker import Job, Reply, Vocabulary, read_frame, write_frame
from deepinfer_ray.errors import RowError

_LOG = logging.getLogger(__name__)

MAX_DEATHS = 2
"""A compiling process that dies this often with a grammar under way takes the grammar with it."""

_FAILURE_BYTES = 1024
_PROGRAM = "from deepinfer_ray.engine.grammar_worker import main; main()"
"""By its name, not with -m: what it sends must be found under that name here."""


@dataclass(frozen=True)
class PoolOptions:
    """workers: grammars compiled at the same time. timeout_s: for one of them, from when its compilation
    begins (so that nobody fails because others were in front). memory_bytes: for one of them. cache_bytes:
    of all that are kept, 0 = keep none."""

    workers: int = 4
    timeout_s: float = 20.0
    memory_bytes: int = 4 << 30
    cache_bytes: int = 10 << 30
    debug: bool = False
    """Log every grammar that is done: its number, time and size, never its text."""


class Build:
    """One grammar, under way or done. `compiled` (an `xgrammar.CompiledGrammar`) or `error` is set at the
    end, before `done`."""

    __slots__ = ("asked_at", "compiled", "deaths", "done", "error", "job", "num_bytes")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = False
        self.compiled: Any = None
        self.error: RowError | None = None
        self.num_bytes = _FAILURE_BYTES
        self.deaths = 0
        self.asked_at = time.monotonic()


class GrammarPool:
    """Compiles grammars for one vocabulary. Nothing is started before the first `get`."""

    def __init__(self, vocabulary: Vocabulary, options: PoolOptions | None = None) -> None:
        self.vocabulary, self.options = vocabulary, options or PoolOptions()
        self.num_compiled = 0
        """Compilations begun so far."""
        self._done: OrderedDict[str, Build] = OrderedDict()
        self._done_bytes = 0
        self._under_way: dict[str, Build] = {}
        self._by_number: dict[int, Build] = {}
        self._changed = threading.Condition()
        self._to_send: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._read_error = ""

    def get(self, spec: GrammarSpec) -> Build:
        """The grammar of `spec`: kept, under way already, or begun now."""
        with self._changed:
            if self._closed:
                raise RuntimeError("this grammar pool is closed")
            build = self._done.get(spec.key)
            if build is not None:
                self._done.move_to_end(spec.key)
                return build
            build = self._under_way.get(spec.key)
            if build is not None:
                return build
            job = Job(self.num_compiled, spec.kind, spec.text, spec.any_whitespace)
            self.num_compiled += 1
            build = self._under_way[spec.key] = self._by_number[job.number] = Build(job)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send, name="grammars", daemon=True)
                self._sender.start()
        self._to_send.put(job)
        return build

    def collect(self) -> None:
        """Moves what was compiled since the last call into the cache, dropping the longest unused."""
        with self._changed:
            finished = [key for key, build in self._under_way.items() if build.done]
            for key in finished:
                build = self._under_way.pop(key)
                if build.num_bytes <= self.options.cache_bytes:
                    self._done[key] = build
                    self._done_bytes += build.num_bytes
            while self._done_bytes > self.options.cache_bytes:
                _, dropped = self._done.popitem(last=False)
                self._done_bytes -= dropped.num_bytes

    def wait(self, timeout_s: float) -> None:
        """Until something that was under way is done, or the time is over."""
        with self._changed:
            if not any(build.done for build in self._under_way.values()):
                self._changed.wait(timeout_s)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def cached_bytes(self) -> int:
        return self._done_bytes

    def close(self) -> None:
        """Ends process and threads; what is under way stays undone. May be called twice."""
        with self._changed:
            self._closed = True
            process = self._process
        self._to_send.put(None)
        if process is not None:
            process.kill()
        if self._sender is not None:
            self._sender.join()

    # -- the sender's thread ----------------------------------------------------------------------------

    def _send(self) -> None:
        """Starts the process and passes jobs on; after a death starts it again and repeats what is open."""
        while True:
            with tempfile.TemporaryFile() as errors:
                process = self._start(errors)
                reader = threading.Thread(target=self._read, args=(process,), name="grammars", daemon=True)
                try:
                    assert process.stdin is not None
                    write_frame(process.stdin, self.vocabulary)
                    reader.start()
                    ended = self._pass_on(process)
                except OSError:  # it died; the reader has seen it or sees it now
                    ended = False
                with contextlib.suppress(OSError):
                    process.stdin.close()  # type: ignore[union-attr]
                process.kill()
                process.wait()
                if reader.ident is not None:
                    reader.join()
                if ended or self._closed:
                    return
                errors.seek(0)
                self._after_death(self._read_error or errors.read().decode(errors="replace").strip())

    def _start(self, errors: Any) -> subprocess.Popen[bytes]:
        options = self.options
        arguments = (options.workers, options.timeout_s, options.memory_bytes)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with self._changed:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
            if self._closed:
                self._process.kill()
            return self._process

    def _pass_on(self, process: subprocess.Popen[bytes]) -> bool:
        """Jobs into the process, until the pool closes (True) or the process is dead (False)."""
        assert process.stdin is not None
        with self._changed:  # those a dead process left; what still stands in the queue comes anyway
            again = [build.job for build in self._by_number.values() if build.deaths and not build.done]
        for job in again:
            write_frame(process.stdin, job)
        while True:
            try:
                job_or_end = self._to_send.get(timeout=0.5)
            except queue.Empty:
                if process.poll() is not None:
                    return False
                continue
            if job_or_end is None:
                return True
            try:
                write_frame(process.stdin, job_or_end)
            except OSError:
                self._to_send.put(job_or_end)
                raise

    def _after_death(self, said: str) -> None:
        """Every open grammar may have been the cause: it gets another chance or is given up."""
        reason = said.splitlines()[-1] if said else "it left no message"
        with self._changed:
            for build in list(self._by_number.values()):
                build.deaths += 1
                if build.deaths >= MAX_DEATHS:
                    self._finish(
                        build,
                        error=RowError("internal", f"the process of the grammar compiler died: {reason}"),
                    )

    # -- the reader's thread ----------------------------------------------------------------------------

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        info = None
        try:
            while True:
                reply = read_frame(process.stdout)
                if not isinstance(reply, Reply):
                    continue  # it is ready
                info = info or self.vocabulary.tokenizer_info()
                self._take(reply, info)
        except (EOFError, OSError):
            return
        except Exception as error:  # nothing more would be read: end the process, which is noticed
            self._read_error = f"{type(error).__name__}: {error}"
            process.kill()

    def _take(self, reply: Reply, info: Any) -> None:
        compiled, error = None, None
        if reply.status == "ok":
            from xgrammar import CompiledGrammar

            compiled = CompiledGrammar.deserialize_json(reply.payload, info)
        elif reply.status == "timeout":
            error = RowError(
                "schema_timeout",
                f"the grammar was not compiled within {self.options.timeout_s:g} s (structured.timeout_s); "
                "make it smaller",
            )
        elif reply.status == "died":
            error = RowError(
                "bad_schema",
                "compiling the grammar crashed or took more than "
                f"{self.options.memory_bytes >> 20} MiB (structured.memory_mb); make it smaller",
            )
        else:
            error = RowError("bad_schema", f"the grammar cannot be compiled: {reply.payload}")
        with self._changed:
            build = self._by_number.get(reply.number)
            if build is not None:
                self._finish(build, compiled, error)

    def _finish(self, build: Build, compiled: Any = None, error: RowError | None = None) -> None:
        """Under the lock."""
        build.compiled, build.error = compiled, error
        if compiled is not None:
            build.num_bytes = int(compiled.memory_size_bytes) + len(build.job.text)
        build.done = True
        if self.options.debug:
            _LOG.info(
                "grammar %d (%s, %d characters): %s after %.3f s, %d bytes kept",
                build.job.number,
                build.job.kind,
                len(build.job.text),
                "compiled" if error is None else error.code,
                time.monotonic() - build.asked_at,
                build.num_bytes,
            )
        del self._by_number[build.job.number]
        self._changed.notify_all()
