"""A model of no weights whose tokens prove the bookkeeping, and a byte tokenizer to go with it.

Knows: the cache pools and step metadata, used exactly as the real model uses them. Does not know: attention.
Every layer's ring, entries, index keys and compression state get records that name the token and its
position; the logits of a row are a hash of all records that the row may see. A wrong slot, block, length,
window or order anywhere changes the tokens. `expected_hash` computes the same from the tokens alone.

Needs a layout of numeric mode `exact`: its records are raw float32, so that ids come back as they went in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.metadata import RatioPlan, StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.ops.numerics import Numerics

BOS, EOS, PAD = 0, 1, 2
NUM_BYTES = 256
_PRIME = 16_777_213
"""Largest prime below 2^24: what float32 holds exactly."""
_HALF = 1 << 24


def mix(values: torch.Tensor) -> torch.Tensor:
    """A well-spread non-negative int64 below 2^40 for each int64."""
    values = values * 6364136223846793005 + 1442695040888963407
    values = (values ^ (values >> 29)) * -4658895280553007687
    return (values ^ (values >> 32)) & ((1 << 40) - 1)


def mock_config(vocab_size: int = 512, window: int = 16, **text: Any) -> ModelConfig:
    """A small V4.1 config: window layers, both compression ratios, Engram; `text` overrides keys."""
    return ModelConfig.from_dict(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": [32, 32],
                "expert_dtype": "fp4",
            },
            "text_config": {
                "vocab_size": vocab_size,
                "hidden_size": 64,
                "moe_intermediate_size": 32,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "hidden_act": "silu",
                "swiglu_limit": 10.0,
                "tie_word_embeddings": False,
                "n_shared_experts": 1,
                "scoring_func": "sqrtsoftplus",
                "topk_method": "noaux_tc",
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.5,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "q_lora_rank": 32,
                "head_dim": 64,
                "qk_rope_head_dim": 16,
                "o_groups": 2,
                "o_lora_rank": 32,
                "sliding_window": window,
                "compress_ratios": [0, 2, 2, 1, 1, 1],
                "kv_source_layer_ids": [1, 3],
                "index_source_layer_ids": [1, 3, 4],
                "index_n_heads": 8,
                "index_head_dim": 32,
                "index_topk": 8,
                "candidate_source_layer_id": 3,
                "candidate_topk_blocks": 4,
                "candidate_block_size": 4,
                "engram_layer_ids": [1],
                "engram_num_embeddings": [304],
                "engram_vocab_size": 41,
                "engram_n_heads": 2,
                "engram_head_dim": 32,
                "engram_max_ngram_size": 4,
                "engram_pad_token_id": PAD,
                "engram_compressed_vocab_size": 103,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-20,
                "rope_theta": 10000,
                "compress_rope_theta": 160000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 16,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "original_max_position_embeddings": 256,
                },
                "hc_mult": 4,
                "hc_sinkhorn_iters": 20,
                "hc_eps": 1e-6,
                "num_nextn_predict_layers": 0,
                **text,
            },
        },
        source="mock config",
    )


def byte_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Byte-level tokenizer: BOS, EOS, PAD are 0, 1, 2, byte b is 3 + b, further ids are fillers."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = sorted(alphabet, key=_byte_of)
    vocab = {char: 3 + byte for byte, char in enumerate(by_byte)}
    vocab |= {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    vocab |= {f"<filler {token}>": token for token in range(3 + NUM_BYTES, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<pad>")]
    )
    return tokenizer


def _byte_of(char: str) -> int:
    from deepinfer_ray.engine.detokenizer import piece_bytes

    return piece_bytes(char, byte_level=True)[0]


@dataclass(slots=True)
class MockOutput:
    """hidden: float32 [T, 2], the two halves of each row's hash. taps: none."""

    hidden: torch.Tensor
    taps: torch.Tensor | None = None


class MockModel:
    """Model protocol of the step loop: `config`, `forward`, `logits`.

    fail_token: a row whose own input is this id gets logits of NaN. step_seconds: time a forward takes.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, fail_token: int | None = None, step_seconds: float = 0.0
    ) -> None:
        self.config = config
        self.seed = seed
        self.fail_token = fail_token
        self.step_seconds = step_seconds
        self.num_forwards = 0

    def layout(self, num_drafts: int = 0) -> CacheLayout:
        """The cache layout that this model can work in."""
        return CacheLayout.build(self.config, Numerics("exact"), num_drafts)

    def forward(self, meta: StepMetadata, pools: CachePools) -> MockOutput:
        self.num_forwards += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        layout = pools.layout
        records_Td = torch.zeros(meta.num_rows, layout.head_dim, device=meta.positions.device)
        records_Td[:, 0] = (meta.input_ids + 1).float()
        records_Td[:, 1] = meta.positions.float()
        total_T = ngram_hash(meta.ngram_ids)
        for layer in layout.ring_offsets:
            total_T = total_T + self._window(layer, records_Td, meta, pools)
        for layer, part in layout.main_parts.items():
            plan = meta.ratios[part.ratio]
            entries_Ed = self._entries(layer, records_Td, plan, meta, pools)
            pools.store_entries(layer, entries_Ed, plan.entry_slots)
            if layer in layout.index_parts:
                keys_Ed = entries_Ed[:, : layout.index_record.width]
                pools.store_index_keys(layer, keys_Ed, plan.entry_slots)
            total_T = total_T + self._prefix(layer, plan, meta, pools)
        folded_T = mix(total_T + self.seed)
        hidden_T2 = torch.stack([folded_T % _HALF, (folded_T // _HALF) % _HALF], dim=1).float()
        if self.fail_token is not None:
            hidden_T2[meta.input_ids == self.fail_token] = float("nan")
        return MockOutput(hidden_T2)

    def logits(self, hidden_N2: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] in [-4, 4), a pure function of each row's hash; NaN rows stay NaN."""
        folded_N = hidden_N2.nan_to_num().long() @ torch.tensor([1, _HALF], device=hidden_N2.device)
        vocab = torch.arange(self.config.text.vocab_size, device=hidden_N2.device)
        scattered_NV = mix(folded_N[:, None] * 1_000_003 + vocab)
        logits_NV = (scattered_NV % (1 << 20)).float() / (1 << 17) - 4
        return logits_NV + (hidden_N2[:, :1] - hidden_N2[:, :1])

    @staticmethod
    def _window(layer: int, records_Td: torch.Tensor, meta: StepMetadata, pools: CachePools) -> torch.Tensor:
        if meta.is_prefill:
            assert meta.swa_history is not None
            history = pools.load_window(layer, meta.swa_history)
            buffer = torch.cat([history, records_Td])
            keys = buffer[meta.swa_keys.clamp_min(0)]
            pools.store_window(layer, records_Td, meta.swa_store)
        else:
            pools.store_window(layer, records_Td, meta.swa_store)
            keys = pools.load_window(layer, meta.swa_keys)
        seen = record_hash(keys, layer)
        return torch.where(meta.swa_keys >= 0, seen, 0).sum(1)

    @staticmethod
    def _entries(
        layer: int, records_Td: torch.Tensor, plan: RatioPlan, meta: StepMetadata, pools: CachePools
    ) -> torch.Tensor:
        """One record per entry row: a digest of the group's tokens, and the group's position."""
        stateful = layer in pools.layout.state_offsets
        state = records_Td[:, None].expand(-1, 2, -1)
        if stateful and not meta.is_prefill:
            pools.store_state(layer, state, meta.ring_positions)
        if plan.entry_rows is not None:
            from_step = records_Td[plan.entry_rows.clamp_min(0)]
            members = torch.where(plan.entry_rows[..., None] >= 0, from_step, 0)
            if stateful:
                ring = pools.load_state(layer, plan.entry_ring.clamp_min(0))[..., 1, :]
                members = torch.where(plan.entry_ring[..., None] >= 0, ring, members)
        elif stateful:
            members = pools.load_state(layer, plan.entry_ring.clamp_min(0))[..., 1, :]
        else:
            members = records_Td[:, None]
        if stateful and meta.is_prefill:
            pools.store_state(layer, state, meta.ring_positions)
        entries_Ed = torch.zeros(len(members), records_Td.shape[1], device=records_Td.device)
        entries_Ed[:, 0] = group_digest(members[..., 0].long()).float()
        entries_Ed[:, 1] = plan.entry_positions.float()
        return entries_Ed

    @staticmethod
    def _prefix(layer: int, plan: RatioPlan, meta: StepMetadata, pools: CachePools) -> torch.Tensor:
        """Sum over the entries that each row may see, main records and index keys alike."""
        per_block = pools.layout.entries_per_block(plan.ratio)
        if meta.is_prefill:
            assert plan.load_slots is not None
            assert plan.ks is not None
            slots = plan.load_slots[None]
        else:
            assert meta.block_tables is not None
            place = torch.arange(max(1, meta.max_klen[plan.ratio]), device=plan.klen.device)
            slots = meta.block_tables[:, place // per_block] * per_block + place % per_block
            slots = torch.where(place < plan.klen[:, None], slots, -1)
        seen = record_hash(pools.load_entries(layer, slots), layer)
        if layer in pools.layout.index_parts:
            seen = seen + record_hash(pools.load_index_keys(layer, slots), layer + 1000)
        seen = torch.where(slots >= 0, seen, 0)
        if not meta.is_prefill:
            return seen.sum(1)
        assert plan.ks is not None
        sums = torch.cat([seen.new_zeros(1), seen[0].cumsum(0)])
        return sums[plan.ks + plan.klen] - sums[plan.ks]


def record_hash(records: torch.Tensor, salt: int) -> torch.Tensor:
    """int64 of the token (or digest) and position that a record [..., d] names; NaN gives a constant."""
    named = records[..., :2].nan_to_num(nan=-77.0).long()
    return mix(named[..., 0] * 8_388_617 + named[..., 1] * 131 + salt * 1_000_033)


def group_digest(tokens: torch.Tensor) -> torch.Tensor:
    """int64 [E] below 2^24 of the tokens [E, r] (ids + 1) of a group, order included."""
    scale = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * 7919
    return (tokens * scale).sum(1) % _PRIME


def ngram_hash(ngram_ids_TG: torch.Tensor) -> torch.Tensor:
    """int64 [T] of the n-gram windows."""
    if ngram_ids_TG.shape[1] == 0:
        return torch.zeros(len(ngram_ids_TG), dtype=torch.int64, device=ngram_ids_TG.device)
    return mix(ngram_ids_TG + torch.arange(ngram_ids_TG.shape[1], device=ngram_ids_TG.device) * 7001).sum(1)


def expected_logits(model: MockModel, tokens: list[int], ngram: torch.Tensor) -> torch.Tensor:
    """float32 [V]: what the model must say after `tokens`, computed without caches and metadata.

    ngram: int64 [G], the window of the last token.
    """
    layout, last = model.layout(), len(tokens) - 1
    ids = torch.tensor(tokens) + 1
    places = torch.arange(len(tokens))
    seen = places > last - layout.window
    total = ngram_hash(ngram[None])[0]
    for layer in layout.ring_offsets:
        total = total + record_hash(torch.stack([ids, places], 1)[seen].float(), layer).sum()
    for layer, part in layout.main_parts.items():
        groups = len(tokens) // part.ratio
        members = ids[: groups * part.ratio].view(groups, part.ratio)
        records = torch.stack([group_digest(members), torch.arange(groups) * part.ratio], 1).float()
        total = total + record_hash(records, layer).sum()
        if layer in layout.index_parts:
            total = total + record_hash(records, layer + 1000).sum()
    folded = mix(total + model.seed)
    hidden = torch.stack([folded % _HALF, (folded // _HALF) % _HALF]).float()
    return model.logits(hidden[None])[0]
