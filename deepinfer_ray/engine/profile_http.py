"""The profiling endpoint of a rank: `/profile` over HTTP, off by default (spec/engine.md §12).

Knows: parameters, status codes, JSON replies. Does not know: how a profile is made (`profiling.py`).
Listens on the loopback address unless told otherwise: whoever reaches it can make files on this machine. For
the same reason it refuses what a web page of another site sends through the user's browser.

    curl 'http://127.0.0.1:6070/profile?num_steps=20'
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from deepinfer_ray.engine.profiling import FINISH_S, PICKUP_S, ProfileBusyError, Profiler, ProfileTimeoutError

logger = logging.getLogger(__name__)

ROUTE = "/profile"
MAX_BODY_BYTES = 1 << 16
MAX_PORT = 65535


class ProfileServer:
    """Serves one engine's profiler on a daemon thread until `close`."""

    def __init__(
        self,
        profiler: Profiler,
        host: str,
        port: int,
        *,
        pickup_s: float = PICKUP_S,
        finish_s: float = FINISH_S,
    ) -> None:
        """port: 0 = any free one. `OSError` if it cannot be bound."""
        handler = _handler(profiler, pickup_s, finish_s)
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="profile-http", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, profiler: Profiler, host: str, port_base: int) -> ProfileServer | None:
        """The server on `port_base` + GPU number; None, with a warning, when that port is not to be had."""
        port = port_base + profiler.gpu_id
        try:
            if port > MAX_PORT:
                raise OSError(f"there is no port {port}")
            server = cls(profiler, host, port)
        except OSError as error:
            logger.warning("no profiling endpoint on %s:%d: %s; the engine runs without", host, port, error)
            return None
        logger.info("profiles: http://%s:%d%s", host, port, ROUTE)
        return server

    def close(self) -> None:
        """Stops listening; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _RefusedError(Exception):
    """What becomes a reply other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _handler(profiler: Profiler, pickup_s: float, finish_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def answer(self) -> None:
            try:
                if urlsplit(self.path).path.rstrip("/") != ROUTE:
                    raise _RefusedError(404, f"there is only {ROUTE}")
                if self.command not in ("GET", "POST"):
                    raise _RefusedError(405, f"use GET or POST, not {self.command}")
                trace = _profile(profiler, self.headers, self.path, self.body, pickup_s, finish_s)
            except _RefusedError as refused:
                self.reply(refused.status, {"status": "error", "message": str(refused)})
            except Exception as error:
                logger.exception("a profiling request failed")
                self.reply(500, {"status": "error", "message": f"{type(error).__name__}: {error}"})
            else:
                self.reply(200, trace)

        def body(self) -> bytes:
            text = self.headers.get("Content-Length") or "0"
            if not text.isdigit() or int(text) > MAX_BODY_BYTES:
                raise _RefusedError(
                    400, f"Content-Length is {text!r}; at most {MAX_BODY_BYTES} bytes are read"
                )
            return self.rfile.read(int(text))

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 405:
                self.send_header("Allow", "GET, POST")
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug("profiling endpoint: %s", format % args)

    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        setattr(Handler, f"do_{method}", Handler.answer)
    return Handler


def _profile(
    profiler: Profiler,
    headers: Any,
    path: str,
    body: Callable[[], bytes],
    pickup_s: float,
    finish_s: float,
) -> dict[str, Any]:
    if headers.get("Sec-Fetch-Site") == "cross-site" or headers.get("Origin") is not None:
        raise _RefusedError(400, "requests of web pages are refused; use curl")
    values = _parameters(path, body())
    try:
        future = profiler.request(**values)
        trace = profiler.wait(future, pickup_s, finish_s)
    except ValueError as error:
        raise _RefusedError(400, str(error)) from None
    except ProfileBusyError as error:
        raise _RefusedError(409, str(error)) from None
    except ProfileTimeoutError as error:
        raise _RefusedError(503, str(error)) from None
    return {
        "status": "ok",
        "message": f"open {trace} in chrome://tracing or Perfetto",
        "gpu_id": profiler.gpu_id,
        "trace_file": str(trace),
    }


def _parameters(path: str, body: bytes) -> dict[str, Any]:
    """Of the query and of a JSON object in the body, which wins."""
    values: dict[str, Any] = dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
    if "num_steps" in values:
        try:
            values["num_steps"] = int(values["num_steps"])
        except ValueError:
            raise _RefusedError(400, f"num_steps is {values['num_steps']!r}; give a whole number") from None
    if body.strip():
        try:
            content = json.loads(body)
        except ValueError as error:
            raise _RefusedError(400, f"the body is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise _RefusedError(400, f"the body is a JSON {type(content).__name__}, expected an object")
        values |= content
    unknown = sorted(set(values) - {"num_steps", "output_dir"})
    if unknown:
        raise _RefusedError(400, f"unknown parameter {unknown[0]}; there are num_steps and output_dir")
    if "output_dir" in values and (not isinstance(values["output_dir"], str) or not values["output_dir"]):
        raise _RefusedError(400, f"output_dir is {values['output_dir']!r}; give a directory")
    return values
