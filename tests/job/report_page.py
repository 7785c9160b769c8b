"""What the tests of the report share: a backend with numbers of ranks, a reader of the page."""

from __future__ import annotations

from html.parser import HTMLParser

from stub_backend import StubBackend

from deepinfer_ray.fleet.backend import RankStats

ALL_CHARTS = {
    "throughput",
    "rows",
    "phases",
    "batch",
    "in-flight",
    "cache",
    "mfu",
    "prompt-lengths",
    "completion-lengths",
    "errors",
    "finish-reasons",
    "prefix",
    "accepted",
    "experts",
}


class PulsingBackend(StubBackend):
    """The stub with the numbers of two ranks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.pulses = 0

    def take_stats(self):
        self.pulses += 1
        return [RankStats(rank, 0, self.values(rank)) for rank in (0, 1)]

    def values(self, rank):
        n = self.pulses
        return {
            "seconds": 0.01 * n,
            "steps": 12 * n,
            "prompt_steps": 2 * n,
            "empty_steps": 0,
            "prompt_seconds": 0.002 * n,
            "decode_seconds": 0.004 * n,
            "prompt_tokens": 100 * n,
            "completion_tokens": 40 * n,
            "cached_tokens": 5 * n,
            "decode_sequences": 60 * n + rank,
            "first_tokens": n,
            "first_token_seconds": 0.1 * n,
            "preempted": 0,
            "finished": {"stop": n},
            "running": 5,
            "waiting": 1,
            "batched_tokens": 5,
            "kv_cache_usage": 0.25,
            "state_cache_usage": 0.5,
            "mfu": 0.125,
            "expert_load_balance": 1.25,
            "verified_lengths": [0, 0, 4 * n],
            "accepted_lengths": [n, n, 2 * n],
        }

    def status(self):
        return {**super().status(), "ranks": [{"stage": "up"}, {"stage": "loading"}]}


class Page(HTMLParser):
    """Charts, tables, visible text, links of a page; every tag must be closed."""

    VOID = frozenset({"meta", "br", "rect", "circle", "line", "polyline"})

    def __init__(self, text):
        super().__init__()
        self.charts, self.svgs, self.urls, self.text, self.open = [], 0, [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.svgs += tag == "svg"
        if "data-chart" in attrs:
            self.charts.append(attrs["data-chart"])
        self.urls += [v for k, v in attrs.items() if k in ("src", "href", "xlink:href", "action", "srcset")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
