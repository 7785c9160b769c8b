"""The compiling process: what it is asked, what it survives, what is kept."""

from __future__ import annotations

import os
import signal
import time

import pytest

from deepinfer_ray.engine.grammar_pool import Build, GrammarPool
from deepinfer_ray.engine.grammar_spec import GrammarLimits, GrammarSpec
from deepinfer_ray.engine.grammar_worker import Job, Reply, reason_of

PATIENCE_S = 120.0


def finished(pool: GrammarPool, *builds: Build) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(build.done for build in builds):
        assert time.monotonic() < deadline, "a grammar was never done"
        pool.wait(0.2)
    pool.collect()


def spec(number: int) -> GrammarSpec:
    return GrammarSpec.of({"regex": f"a{number}b"})


def test_rows_of_one_schema_share_a_compilation(pool):
    before = pool.num_compiled
    one, same, other = pool.get(spec(1)), pool.get(spec(1)), pool.get(spec(2))
    assert one is same
    finished(pool, one, other)
    assert pool.get(spec(1)) is one
    assert pool.num_compiled == before + 2
    assert pool.num_under_way == 0


def test_failures_are_kept_and_name_their_reason(pool):
    before = pool.num_compiled
    broken = {
        "root ::= foo": 'the grammar cannot be compiled: EBNF parser error at line 1, column 10: Rule "foo"',
        "root ::= root": "the grammar cannot be compiled: no completion matches it",
        "x ::= a": "The root rule with name",
    }
    for text, message in broken.items():
        build = pool.get(GrammarSpec.of({"grammar": text}))
        finished(pool, build)
        assert build.compiled is None
        assert build.error is not None
        assert build.error.code == "bad_schema"
        assert message in str(build.error).replace("\\", "")
        assert "/project/" not in str(build.error)
        assert pool.get(GrammarSpec.of({"grammar": text})) is build
    assert pool.num_compiled == before + len(broken)


def test_what_the_compiler_would_leave_out_is_refused(pool):
    """Should a check before it have missed something: the compiler's warnings are errors."""
    build = pool.get(GrammarSpec("json", '{"type": "number", "multipleOf": 0.5}'))
    finished(pool, build)
    assert "multipleOf is not supported for type:number" in str(build.error)


def test_the_time_of_a_grammar_is_limited_and_the_others_go_on(tight_pool, workshop):
    hard = GrammarSpec.of({"json": workshop.slow_schema()}, GrammarLimits(max_nesting=200))
    slow, fine = tight_pool.get(hard), tight_pool.get(spec(3))
    finished(tight_pool, slow, fine)
    assert slow.error is not None
    assert slow.error.code == "schema_timeout"
    assert "was not compiled within 0.8 s (structured.timeout_s)" in str(slow.error)
    assert fine.compiled is not None
    assert tight_pool.get(hard) is slow  # no second attempt


def test_the_memory_of_a_grammar_is_limited_and_the_others_go_on(make_pool):
    pool = make_pool(timeout_s=60.0, memory_bytes=8 << 20)
    big, fine = pool.get(GrammarSpec.of({"choice": ["x" * 200_000]})), pool.get(spec(4))
    finished(pool, big, fine)
    assert big.error is not None
    assert big.error.code == "bad_schema"
    assert fine.compiled is not None


def test_the_process_is_replaced_when_it_dies(pool):
    first = pool.get(spec(5))
    finished(pool, first)
    assert pool._process is not None
    old = pool._process.pid
    os.kill(old, signal.SIGKILL)
    second = pool.get(spec(6))
    finished(pool, second)
    assert second.compiled is not None
    assert pool._process.pid != old


def test_a_process_that_cannot_start_fails_what_waits_for_it(make_pool, monkeypatch):
    monkeypatch.setattr("deepinfer_ray.engine.grammar_pool._PROGRAM", "raise SystemExit('no compiler here')")
    pool = make_pool()
    build = pool.get(spec(7))
    finished(pool, build)
    assert build.error is not None
    assert build.error.code == "internal"
    assert "no compiler here" in str(build.error)


def test_the_cache_drops_what_was_not_used_for_longest(vocabulary):
    pool = Scripted(vocabulary, cache_bytes=3000)
    builds = [pool.fill(spec(number)) for number in range(2)]
    assert pool.cached_bytes == 2048
    assert pool.get(spec(0)) is builds[0]
    pool.fill(spec(2))
    assert pool.get(spec(0)) is builds[0]
    assert pool.get(spec(1)) is not builds[1]
    nothing = Scripted(vocabulary, cache_bytes=0)
    assert nothing.fill(spec(0)) is not nothing.fill(spec(0))
    assert nothing.cached_bytes == 0


class Scripted(GrammarPool):
    """A pool without a process: every grammar is refused when the test says so."""

    def __init__(self, vocabulary, **options):
        from deepinfer_ray.engine.grammar_pool import PoolOptions

        super().__init__(vocabulary, PoolOptions(**options))

    def _send(self) -> None:
        pass

    def fill(self, asked: GrammarSpec) -> Build:
        build = self.get(asked)
        self._take(Reply(build.job.number, "refused", "by the test"), None)
        self.collect()
        return build


def test_done_grammars_are_logged_on_request(vocabulary, caplog):
    with caplog.at_level("INFO", logger="deepinfer_ray.engine.grammar_pool"):
        Scripted(vocabulary).fill(spec(1))
        Scripted(vocabulary, debug=True).fill(spec(1))
    (line,) = caplog.messages
    assert line.startswith("grammar 0 (regex, 3 characters): bad_schema after 0.0")
    assert "a1b" not in line


def test_a_closed_pool_takes_nothing(vocabulary):
    pool = Scripted(vocabulary)
    pool.get(spec(0))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.get(spec(1))


def test_reasons_are_one_line_without_source_and_grammar():
    text = (
        "[14:59:58] /project/cpp/x.cc:5077: Check failed: (e.empty()) is false: Failed. The JSON string is:{a"
    )
    assert reason_of(RuntimeError(text)) == "Failed"
    assert reason_of(RuntimeError("")) == "RuntimeError"
    assert Job(1, "json", "{}", True) == Job(1, "json", "{}", True)
