"""Rows to experts and back over ranks: two formats, ranks without rows, Engram shards, DeepEP's fake."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.formats import (
    dequant_fp8_groups,
    fake_quant_fp8,
    quantize_fp8_groups,
)
from deepinfer_ray.parallel import deep_ep
from deepinfer_ray.parallel.all_to_all import AllToAllExchange
from deepinfer_ray.parallel.engram_shards import ShardedEngramStore, shard_range
from deepinfer_ray.parallel.engram_store import LocalEngramStore
from deepinfer_ray.parallel.rank_group import RankGroup

Ranks = Callable[[int, Callable[[Any], Any]], list[Any]]


def test_quantized_rows_survive_their_bytes() -> None:
    """Quantizing what is quantized changes nothing, so a row can travel as its bytes."""
    torch.manual_seed(0)
    spread = torch.exp(8 * torch.randn(400, 1))
    x = fake_quant_fp8(torch.randn(400, 96) * spread)
    x[0] = 0.0
    assert torch.equal(dequant_fp8_groups(*quantize_fp8_groups(x)), x)


@pytest.mark.parametrize("row_format", ["fp8", "float32"])
@pytest.mark.parametrize("tokens", [(5, 0, 3), (0, 0, 1), (17, 40, 1)])
def test_every_slot_gets_the_result_of_its_expert(
    run_ranks: Ranks, row_format: Any, tokens: tuple[int, ...]
) -> None:
    n, k, width = 3, 4, 64

    def rank(group: RankGroup) -> list[int]:
        random = torch.Generator().manual_seed(group.rank)
        x = torch.randn(tokens[group.rank], width, generator=random)
        x = fake_quant_fp8(x) if row_format == "fp8" else x
        experts = torch.randint(-1, n * group.size, (len(x), k), generator=random)
        weights = torch.rand(len(x), k, generator=random)
        exchange = AllToAllExchange(group, n, row_format)
        for _ in range(2):
            got = exchange.dispatch(x, experts, weights)
            assert ((got.experts >= 0).any(1)).all(), "a row travels only to ranks that hold an expert of it"
            assert (got.weights[got.experts < 0] == 0).all()
            factor = (got.experts + n * group.rank + 1).unsqueeze(-1)
            out = (got.rows.unsqueeze(1) * factor * got.weights.unsqueeze(-1)).bfloat16().float()
            back = exchange.combine(out.masked_fill((got.experts < 0).unsqueeze(-1), 7.0), got)
            want = (x.unsqueeze(1) * (experts + 1).unsqueeze(-1) * weights.unsqueeze(-1)).bfloat16().float()
            assert torch.equal(back, want.masked_fill((experts < 0).unsqueeze(-1), 0.0))
        return [len(got.rows)]

    assert len(run_ranks(3, rank)) == 3


def test_a_rank_without_experts_is_refused(run_ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="every expert rank needs an expert"):
        run_ranks(1, lambda group: AllToAllExchange(group, 0, "fp8"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_tables_give_the_rows_of_whole_ones(run_ranks: Ranks, ranks: int) -> None:
    """Four ranks: a table of 300 rows leaves the last one without any."""
    rows, width = [300, 700], 64
    random = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 127, (count, width), generator=random, dtype=torch.uint8) for count in rows]
    scales = [torch.randint(120, 130, (count, 2), generator=random, dtype=torch.uint8) for count in rows]
    whole = LocalEngramStore(codes, scales)

    def rank(group: RankGroup) -> None:
        spans = [slice(*shard_range(count, group.size, group.rank)) for count in rows]
        store = ShardedEngramStore(
            group,
            rows,
            [table[span] for table, span in zip(codes, spans, strict=True)],
            [table[span] for table, span in zip(scales, spans, strict=True)],
        )
        own = torch.Generator().manual_seed(group.rank)
        for tokens in (9, 0 if group.rank else 4, 30):
            ids = [torch.randint(-1, count, (tokens, 6), generator=own) for count in rows]
            wanted = torch.stack(ids)
            want = whole.fetch(wanted) if tokens else torch.zeros(2, 0, 6 * width)
            assert torch.equal(store.fetch(wanted), want)

    run_ranks(ranks, rank)
    owned = [shard_range(300, 4, rank) for rank in range(4)]
    assert owned == [(0, 128), (128, 256), (256, 300), (300, 300)]


# ---- DeepEP, behind a fake of its interface


class _Event:
    def current_stream_wait(self) -> None:
        self.waited = True


class _FakeBuffer:
    """One rank: expands rows by local expert, sums them at combine, as the package's documentation says."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.group, self.options = group, options
        self.destroyed = False

    def get_theoretical_num_sms(self, experts: int, slots: int) -> int:
        return 20

    def dispatch(self, x: Any, *, topk_idx: Any, topk_weights: Any, num_experts: int, **options: Any) -> Any:
        self.call = options
        codes, scales = x
        assert codes.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.int32
        assert scales.shape == (len(codes), codes.shape[1] // 128)
        pairs = [(topk_idx == expert).nonzero() for expert in range(num_experts)]
        rows = torch.cat([pair[:, 0] for pair in pairs])
        slots = torch.cat([pair[:, 1] for pair in pairs])
        ends = torch.tensor([len(pair) for pair in pairs]).cumsum(0).int()
        handle = types.SimpleNamespace(psum_num_recv_tokens_per_expert=ends, rows=rows, tokens=len(codes))
        return (codes[rows], scales[rows]), topk_idx[rows], topk_weights[rows, slots], handle, _Event()

    def combine(self, x: torch.Tensor, handle: Any, **options: Any) -> Any:
        assert x.dtype == torch.bfloat16
        total = torch.zeros(handle.tokens, x.shape[1]).index_add_(0, handle.rows, x.float())
        return total.bfloat16(), _Event()

    def destroy(self) -> None:
        self.destroyed = True


def test_deep_ep_rows_go_through_its_buffer() -> None:
    package = types.SimpleNamespace(__version__="2.5.0", EPBuffer=_FakeBuffer)
    assert deep_ep.usable(package)
    shared = deep_ep.DeepEPBuffer.create(
        package, "group", max_rows=deep_ep.buffer_rows(10), hidden=128, top_k=2, physical=5, comm_sms=8
    )
    assert shared.buffer.options["num_max_tokens_per_rank"] == 64
    exchange = deep_ep.DeepEPExchange(shared, 1, 5)
    torch.manual_seed(0)
    x, weights = fake_quant_fp8(torch.randn(10, 128)), torch.rand(10, 2)
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(10)])
    experts[3] = -1
    got = exchange.dispatch(x, experts, weights)
    assert shared.buffer.call["num_max_tokens_per_rank"] == 64
    assert shared.buffer.call["do_expand"]
    assert got.experts.shape == (18, 1)
    out = got.rows.unsqueeze(1) * (got.experts + 1).unsqueeze(-1)
    back = exchange.combine(out, got)
    rounded = (x.unsqueeze(1) * (experts + 1).unsqueeze(-1)).bfloat16().float()
    assert torch.allclose(back[:, 0], rounded.sum(1), rtol=2**-7, atol=1e-3)
    assert (back[3] == 0).all()
    with pytest.raises(ConfigError, match="65 rows exceeds the exchange buffer of 64"):
        exchange.dispatch(torch.zeros(65, 128), torch.zeros(65, 2).long(), torch.zeros(65, 2))
    shared.destroy()
    assert shared.buffer.destroyed


def test_deep_ep_of_another_interface_is_not_used() -> None:
    """The first DeepEP has the same import name and another interface."""
    assert not deep_ep.usable(types.SimpleNamespace(__version__="1.0.0", Buffer=object))
    assert not deep_ep.usable(types.SimpleNamespace(__version__="2.6.0"))
    assert not deep_ep.usable(types.SimpleNamespace(EPBuffer=object))
    assert deep_ep.find("cpu") is None
    with pytest.raises(ConfigError, match=r"divisible by 128 .*moe.transport = torch"):
        deep_ep.DeepEPBuffer.create(None, None, max_rows=1, hidden=64, top_k=2, physical=4, comm_sms=1)
