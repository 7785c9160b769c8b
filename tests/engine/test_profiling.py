"""Profiles of a running engine and their HTTP endpoint: files, parameters, status codes, nobody gets hurt."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.mock import MockModel, byte_tokenizer, mock_config
from deepinfer_ray.engine.profile_http import ProfileServer
from deepinfer_ray.engine.profiling import ProfileBusyError, Profiler, ProfileTimeoutError, visible_gpu
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.timers import StepTimers

TOKENIZER = byte_tokenizer(512)


def make_engine(profile_http: dict[str, Any] | None = None, rank: int = 0) -> Engine:
    model = MockModel(mock_config())
    settings = SchedulerSettings(num_blocks=17, max_seqs=4, max_model_len=512, vocab_size=512)
    config = EngineConfig.model_validate({"observability": {"profile_http": profile_http or {}}})
    pools = CachePools(model.layout(), 17, settings.num_state_slots)
    compress = (np.arange(512) % 103).astype(np.int32)
    return Engine(model, pools, TOKENIZER, config, compress=compress, settings=settings, rank=rank)


def work(engine: Engine, tokens: int = 8) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    engine.add(Request(np.arange(3, 13, dtype=np.int32), params))


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_a_profile_shows_the_next_steps(tmp_path: Path) -> None:
    engine = make_engine(rank=3)
    work(engine)
    engine.step()
    future = engine.profile(4, tmp_path / "new" / "profiles")
    with pytest.raises(ProfileBusyError, match="try again"):
        engine.profile(1)
    engine.run()
    trace = future.result(60)
    assert re.fullmatch(r"profile-[\d.]+-gpu3-rank3-\d{8}-\d{6}-\d{3}\.json", trace.name)
    names = [event.get("name", "") for event in events(trace)]
    assert [name for name in names if name.startswith("forward ")] == [f"forward {s}" for s in (2, 3, 4, 5)]
    assert any(name.startswith("aten::") for name in names)
    spans = events(trace.with_name(f"{trace.stem}-timeline.json"))
    assert {e["args"]["step"] for e in spans if e.get("cat") == "forward"} == {2, 3, 4, 5}
    assert engine.loop.timers.timeline is None
    assert not engine.loop.timers.annotate
    engine.close()
    engine.close()


def test_a_profile_ends_with_the_work(tmp_path: Path) -> None:
    engine = make_engine()
    work(engine, tokens=3)
    future = engine.profile(50, tmp_path)
    engine.run()
    trace = future.result(60)
    assert 3 <= sum(event.get("name", "").startswith("forward ") for event in events(trace)) <= 5
    engine.close()


@pytest.mark.parametrize("steps", [0, 51, -1, True, "5", 2.0, None])
def test_number_of_steps_is_checked(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"num_steps is .*; it must be a whole number from 1 to 50"):
        Profiler(StepTimers()).request(steps)


def test_directory_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the output_dir .*file/below cannot be made"):
        Profiler(StepTimers()).request(1, tmp_path / "file" / "below")


def test_a_profiler_that_fails_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(torch.profiler, "profile", broken)
    engine = make_engine()
    work(engine)
    future = engine.profile(2, tmp_path)
    assert len(engine.run()) == 1
    with pytest.raises(RuntimeError, match="no profiler here"):
        future.result(0)
    engine.profile(2, tmp_path)  # the mailbox is free again
    engine.close()


def test_what_no_step_picks_up_is_withdrawn(tmp_path: Path) -> None:
    engine = make_engine()
    future = engine.profile(2, tmp_path)
    with pytest.raises(ProfileTimeoutError, match=r"no step began within 0.05 s; is the engine idle\?"):
        engine.profiler.wait(future, pickup_s=0.05)
    work(engine)
    engine.run()
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert visible_gpu(torch.device("cpu"), fallback=2) == 2
    assert visible_gpu(torch.device("cuda")) == 5
    assert visible_gpu(torch.device("cuda:1")) == 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f2e")
    assert visible_gpu(torch.device("cuda:0")) == 0


# ---- HTTP

Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    yield made
    made.close()


@pytest.fixture
def ask(engine: Engine) -> Iterator[Ask]:
    """ask(method, path, body, headers) → (status, reply)."""
    server = ProfileServer(engine.profiler, "127.0.0.1", 0, pickup_s=0.3, finish_s=20)

    def send(
        method: str = "GET", path: str = "/profile", body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(*server.address, timeout=30)
        data = body if body is None or isinstance(body, str) else json.dumps(body)
        connection.request(method, path, data, {name.replace("_", "-"): v for name, v in headers.items()})
        response = connection.getresponse()
        content = json.loads(response.read())
        connection.close()
        return response.status, content

    yield send
    server.close()


def test_endpoint_is_off_by_default_and_on_loopback_when_on(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = make_engine()
    assert quiet.profile_server is None
    quiet.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = make_engine({"enabled": True, "port_base": port - 1}, rank=1)
    assert engine.profile_server is not None
    assert engine.profile_server.address == ("127.0.0.1", port)
    engine.close()
    assert engine.profile_server is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_in_use_costs_the_endpoint_only(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = make_engine({"enabled": True, "port_base": taken.getsockname()[1]})
    assert engine.profile_server is None
    assert "no profiling endpoint on 127.0.0.1" in caplog.text
    work(engine)
    assert len(engine.run()) == 1
    engine.close()


def test_profile_over_http(engine: Engine, ask: Ask, tmp_path: Path) -> None:
    work(engine, tokens=400)
    done = threading.Event()

    def run() -> None:
        while not done.is_set() and engine.has_unfinished():
            engine.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        # the body wins over the query
        status, reply = ask("POST", "/profile?num_steps=50", {"num_steps": 2, "output_dir": str(tmp_path)})
    finally:
        done.set()
        thread.join()
    assert (status, reply["status"], reply["gpu_id"]) == (200, "ok", 0)
    trace = Path(reply["trace_file"])
    assert trace.parent == tmp_path
    assert sum(event.get("name", "").startswith("forward ") for event in events(trace)) == 2


def test_idle_engine_answers_503(ask: Ask, tmp_path: Path) -> None:
    status, reply = ask("GET", f"/profile?output_dir={tmp_path}")
    assert (status, reply["status"]) == (503, "error")
    assert "no step began within 0.3 s" in reply["message"]


def test_second_request_answers_409(engine: Engine, ask: Ask) -> None:
    engine.profile(1)
    status, reply = ask()
    assert (status, reply) == (
        409,
        {"status": "error", "message": "another profile is queued or running; try again when it is done"},
    )


def test_a_broken_profiler_answers_500(engine: Engine, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.profiler, "request", lambda **_: 1 / 0)
    status, reply = ask()
    assert (status, reply["message"]) == (500, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/", None, 404, "there is only /profile"),
        ("GET", "/profile/x", None, 404, "there is only /profile"),
        ("PUT", "/profile", None, 405, "use GET or POST, not PUT"),
        ("DELETE", "/profile", None, 405, "not DELETE"),
        ("GET", "/profile?num_steps=three", None, 400, "num_steps is 'three'"),
        ("GET", "/profile?num_steps=0", None, 400, "from 1 to 50"),
        ("GET", "/profile?num_steps=51", None, 400, "from 1 to 50"),
        ("GET", "/profile?steps=5", None, 400, "unknown parameter steps; there are num_steps and output_dir"),
        ("GET", "/profile?output_dir=", None, 400, "give a directory"),
        ("POST", "/profile", {"num_steps": True}, 400, "num_steps is True"),
        ("POST", "/profile", {"num_steps": "5"}, 400, "num_steps is '5'"),
        ("POST", "/profile", {"output_dir": 7}, 400, "output_dir is 7"),
        ("POST", "/profile", {"output_dir": "/dev/null/x"}, 400, "cannot be made"),
        ("POST", "/profile", [1], 400, "the body is a JSON list"),
        ("POST", "/profile", "{", 400, "the body is no JSON"),
        ("POST", "/profile", "x" * 70000, 400, "at most 65536 bytes"),
    ],
)
def test_refusals(ask: Ask, method: str, path: str, body: Any, status: int, words: str) -> None:
    got, reply = ask(method, path, body)
    assert (got, reply["status"]) == (status, "error")
    assert words in reply["message"]


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://example.org"}, {"Sec_Fetch_Site": "cross-site"}], ids=["origin", "fetch"]
)
def test_web_pages_are_refused(ask: Ask, headers: dict[str, str]) -> None:
    status, reply = ask(**headers)
    assert status == 400
    assert "requests of web pages are refused" in reply["message"]
