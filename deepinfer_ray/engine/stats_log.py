"""Statistics as log lines, every so many steps, written by a thread of their own (spec/engine.md §9.6).

Knows: the lines' form, when one is due, the queue between the step loop and the writer. Does not know: how a
figure comes about (`stats.py`), where log lines go. The engine's thread copies numbers and goes on; if the
writer lags behind, lines are dropped, never steps delayed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_ray.engine.stats import Capture
from deepinfer_ray.engine.timers import Timing, Timings

logger = logging.getLogger("deepinfer_ray.stats")

QUEUE_LINES = 8
STAGGER_S = 0.005
STAGGERED_RANKS = 8
"""Ranks of one machine write at different moments: rank modulo 8, times 5 ms."""
PROMPT_INTERVAL = 20
"""Steps between lines of a rank that only prefills, whose steps are long."""
FIRST_MEMORY_STEP = 10


def stats_line(figures: dict[str, Any], rank: int = 0) -> str:
    """One line with every figure by name; unknown ones say so, shares are in percent, times in ms."""
    f = figures

    def percent(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.1%}"

    def number(value: float | None, digits: int = 1) -> str:
        return "unknown" if value is None else f"{value:.{digits}f}"

    parts = [
        f"rank={rank}",
        f"steps={f['steps']}",
        f"is_prompt={f['is_prompt']}",
        f"cur_SPS={number(f['last_steps_per_second'])}",
        f"avg_SPS={number(f['steps_per_second'])}",
        f"cur_TPS={number(f['last_tokens_per_second'])}",
        f"prompt_TPS={number(f['prompt_tokens_per_second'])}",
        f"completion_TPS={number(f['completion_tokens_per_second'])}",
    ]
    if f["draft_accept_rates"]:
        rates = ",".join(percent(rate) for rate in f["draft_accept_rates"])
        parts += [
            f"avg_nextn_accept_rate={percent(f['draft_accept_rate'])}",
            f"nextn_accept_rate=[{rates}]",
            f"verified_tokens={f['verified_tokens']}",
            f"accepted_tokens={f['accepted_tokens']}",
            f"avg_verified_len={number(f['mean_verified_length'], 2)}",
        ]
        if f["mean_confidence_error"] is not None:
            parts.append(f"avg_confidence_error={number(f['mean_confidence_error'], 3)}")
    if f["expert_load_balance"] is not None:
        parts.append(f"moe_lb={number(f['expert_load_balance'], 3)}")
    parts += [
        f"running={f['running']}",
        f"pending={f['waiting']}",
        f"chunked={f['chunked']}",
        f"num_batched_tokens={f['batched_tokens']}[{percent(f['batch_usage'])}]",
        f"KV_cache_usage={percent(f['kv_cache_usage'])}",
        f"state_cache_usage={percent(f['state_cache_usage'])}",
    ]
    if f["prompt_time_share"] is not None:
        share = f["prompt_time_share"]
        parts.append(f"prefill/decode_time={percent(share)}/{percent(1 - share)}")
    parts += [
        f"prefill_caching_rate={percent(f['prefill_caching_rate'])}",
        f"TTFT_ms=max:{1e3 * f['ttft_max_s']:.0f},mean:{1e3 * f['ttft_mean_s']:.0f}",
        f"avg_length=input:{number(f['mean_input_length'])},output:{number(f['mean_output_length'])}",
        f"finished={sum(f['finished'].values())}",
        f"preempted={f['preempted']}",
        f"aborted={f['finished'].get('aborted', 0)}",
        f"sum_seqlen_qxk={f['sum_seqlen_qxk']}",
        f"max_seqlen_k={f['max_seqlen_k']}",
        f"min_seqlen_k={f['min_seqlen_k']}",
        f"attn_TFLOPs={number(f['attention_tflops'], 3)}",
        f"TFLOPs={number(f['tflops'], 3)}",
        f"MFU={percent(f['mfu'])}",
    ]
    return "[stats] " + " ".join(parts)


def timing_line(kind: str, timings: dict[str, Timing], seconds: float) -> str:
    """Timers of one kind (`cpu`, `cuda`) in ms; seconds: what their share is taken of."""
    spans = (
        f"{name}=cur:{1e3 * t.last:.3f},mean:{1e3 * t.mean:.3f},max:{1e3 * t.longest:.3f},calls:{t.calls},"
        f"share:{t.total / seconds if seconds > 0 else 0:.1%}"
        for name, t in timings.items()
    )
    return f"[{kind}] ms: " + " ".join(spans)


def memory_outside_torch(device: torch.device) -> int | None:
    """Bytes of a CUDA device in use outside of torch: libraries of collectives and kernels, others."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class StatsLog:
    """Says when a line is due and writes it. `due` and `put` are called by the engine's thread."""

    def __init__(
        self,
        interval: int,
        *,
        rank: int = 0,
        memory_interval: int = 1000,
        memory: Callable[[], int | None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """interval: steps between lines; 0 or less = never. memory: bytes outside torch, None = unknown."""
        self.interval = interval
        self.rank = rank
        self.dropped = 0
        self._memory_interval, self._memory, self._last_memory = memory_interval, memory, -1
        self._sleep = sleep
        self._queue: queue.Queue[tuple[Capture, Timings] | None] = queue.Queue(QUEUE_LINES)
        self._thread: threading.Thread | None = None
        self._next_memory = FIRST_MEMORY_STEP

    def due(self, steps: int) -> bool:
        """Whether a line is due after `steps` steps."""
        return self.interval > 0 and steps % self.interval == 0

    def put(self, capture: Capture, timings: Timings) -> None:
        """Hand over the numbers of a line; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stats-log", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((capture, timings))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is queued and ends the thread; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._sleep(self.rank % STAGGERED_RANKS * STAGGER_S)
            try:
                self._write(*item)
            except Exception:
                logger.exception("statistics of rank %d could not be written", self.rank)

    def _write(self, capture: Capture, timings: Timings) -> None:
        logger.info("%s", stats_line(capture.figures(), self.rank))
        seconds = sum(sample.seconds for sample in capture.samples[-self.interval :])
        for kind, spans in (("cpu", timings.cpu), ("cuda", timings.cuda)):
            if spans:
                logger.info("%s", timing_line(kind, spans, seconds))
        steps = capture.totals["steps"]
        if steps >= self._next_memory:
            self._next_memory = steps + self._memory_interval
            memory = self._memory()
            if memory is not None and memory != self._last_memory:
                self._last_memory = memory
                logger.info("[nccl_memory] rank=%d MiB outside torch: %d", self.rank, memory >> 20)
