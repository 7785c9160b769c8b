"""CPU tokens/s of a tiny checkpoint beside `transformers`' DeepseekV4 at the same dimensions.

The peer is the V4 family (its code has no V4.1): hidden size, heads, ranks, experts, window, top-k and layer
count are equal; ours additionally quantizes activations and caches (`numerics="released"`), looks up Engram
rows and re-indexes inside candidate blocks. Both run greedy, the same number of prompt and output tokens, one
after the other in the same process, medians of alternating repetitions.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from deepinfer_ray.config.hf import ModelConfig, TextConfig
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.llm import LLM

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 64
BATCHES = (1, 8, 16)


def peer_model(text: TextConfig) -> Any:
    """transformers' DeepseekV4 with the dimensions of `text` and random weights."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # type: ignore[import-not-found, unused-ignore]

    ratios = text.compress_ratios[: text.num_hidden_layers]
    sparse = "compressed_sparse_attention"
    config = DeepseekV4Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        moe_intermediate_size=text.moe_intermediate_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        head_dim=text.head_dim,
        q_lora_rank=text.q_lora_rank,
        o_lora_rank=text.o_lora_rank,
        o_groups=text.o_groups,
        partial_rotary_factor=text.qk_rope_head_dim / text.head_dim,
        num_experts_per_tok=text.num_experts_per_tok,
        n_routed_experts=text.n_routed_experts,
        max_position_embeddings=text.max_position_embeddings,
        layer_types=["sliding_attention" if ratio == 0 else sparse for ratio in ratios],
        compress_rates={sparse: 2, "heavily_compressed_attention": 128},
        mlp_layer_types=["moe"] * text.num_hidden_layers,
        sliding_window=text.sliding_window,
        index_n_heads=text.index_n_heads,
        index_head_dim=text.index_head_dim,
        index_topk=text.index_topk,
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(0)
    return DeepseekV4ForCausalLM(config).eval()


def _peer_seconds(model: Any, prompts: np.ndarray) -> float:
    ids = torch.from_numpy(prompts).long()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=OUTPUT_TOKENS,
        min_new_tokens=OUTPUT_TOKENS,
        do_sample=False,
        pad_token_id=2,
    )
    return time.perf_counter() - start


def _our_seconds(llm: LLM, prompts: np.ndarray) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    results = llm.generate(prompt_token_ids=list(prompts), sampling_params=params)
    seconds = time.perf_counter() - start
    produced = sum(len(result.token_ids) for result in results)
    if produced != prompts.shape[0] * OUTPUT_TOKENS:
        raise RuntimeError(f"expected {prompts.shape[0] * OUTPUT_TOKENS} tokens, got {produced}")
    return seconds


def run(repetitions: int = 3, numerics: Literal["exact", "released"] = "released") -> list[dict[str, Any]]:
    """Rows `{"batch", "ours_tokens_per_second", "peer_tokens_per_second", "ratio"}` for batch 1, 8 and 16."""
    from deepinfer_ray.model.synthetic import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path, preset="tiny", seed=0)
        text = ModelConfig.load(path).text
        ours = LLM(str(path), numerics=numerics, max_num_seqs=max(BATCHES), max_model_len=256)
        peer = peer_model(text)
        rng = np.random.default_rng(0)
        rows = []
        for batch in BATCHES:
            prompts = rng.integers(3, text.vocab_size, (batch, PROMPT_TOKENS), dtype=np.int32)
            _our_seconds(ours, prompts), _peer_seconds(peer, prompts)  # warm-up
            pairs = [(_our_seconds(ours, prompts), _peer_seconds(peer, prompts)) for _ in range(repetitions)]
            tokens = batch * OUTPUT_TOKENS
            mine, theirs = (tokens / statistics.median(column) for column in zip(*pairs, strict=True))
            rows.append(
                {
                    "batch": batch,
                    "ours_tokens_per_second": round(mine, 1),
                    "peer_tokens_per_second": round(theirs, 1),
                    "ratio": round(mine / theirs, 2),
                }
            )
        return rows
