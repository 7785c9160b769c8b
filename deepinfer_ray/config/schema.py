"""The JSON objects of `config.json` as frozen, strictly typed models (spec/model.md §1.2–1.4).

Knows: key names, types, ranges, defaults. Does not know: rules between keys (`rules.py`), files (`hf.py`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Ints = Annotated[tuple[StrictInt, ...], Field(strict=False)]


class Block(BaseModel):
    """A JSON object of the config; unknown keys are dropped here, the loader warns once about all of them."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class RopeScaling(Block):
    """YaRN of the layers with a ratio; the type string is not checked (spec/model.md §1.3)."""

    factor: float = Field(gt=0)
    beta_fast: float = Field(gt=0)
    beta_slow: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)
    rope_type: str | None = None


class QuantizationConfig(Block):
    """All five keys are required and have one legal value each (spec/model.md §1.2)."""

    quant_method: str
    expert_dtype: str
    activation_scheme: str
    weight_block_size: Ints
    scale_fmt: str


class VisionConfig(Block):
    """The vision tower (spec/vision.md §1). Exists only with `num_hidden_layers` > 0."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    patch_size: int = Field(ge=1)
    downsample_ratio: int = Field(ge=1)
    max_image_tokens: int = Field(ge=1)
    min_pixels: int = Field(ge=1)
    rope_theta: float = Field(10000.0, gt=0)
    max_wh_ratio: float | None = Field(None, ge=1)


class TextConfig(Block):
    """`text_config` under its own key names, absent optional keys replaced by their defaults."""

    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    moe_intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int
    head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=2)
    q_lora_rank: int = Field(ge=1)
    o_lora_rank: int = Field(ge=1)
    o_groups: int = Field(ge=1)
    hidden_act: str
    swiglu_limit: float | None = Field(ge=0)
    """Clamp of the SwiGLU inputs; None = no clamp (a stored 0 means the same)."""
    rms_norm_eps: float = Field(ge=0)
    attention_bias: bool
    attention_dropout: float
    tie_word_embeddings: bool
    max_position_embeddings: int = Field(ge=1)
    rope_theta: float = Field(gt=1)
    compress_rope_theta: float = Field(gt=1)
    rope_scaling: RopeScaling | None = None

    n_routed_experts: int = Field(ge=1)
    n_shared_experts: int = Field(ge=0)
    num_experts_per_tok: int = Field(ge=1)
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float

    sliding_window: int = Field(ge=1)
    compress_ratios: Ints
    kv_source_layer_ids: Ints
    index_source_layer_ids: Ints
    index_k_source_layer_ids: Ints
    index_n_heads: int = Field(ge=1)
    index_head_dim: int = Field(ge=1)
    index_topk: int = Field(ge=1)
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    use_fp4_sparse_kv: bool = True

    hc_mult: int = Field(ge=1)
    hc_sinkhorn_iters: int = Field(ge=1)
    hc_eps: float = Field(ge=0)
    hc_shifted: bool = True

    engram_layer_ids: Ints = ()
    engram_num_embeddings: Ints | None = None
    engram_max_ngram_size: int = Field(1, ge=1)
    engram_vocab_size: int = Field(0, ge=0)
    engram_n_heads: int = Field(0, ge=0)
    engram_head_dim: int = Field(0, ge=0)
    engram_compressed_vocab_size: int = Field(0, ge=0)
    engram_pad_token_id: int = 0

    num_nextn_predict_layers: int = Field(0, ge=0)
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: Ints = ()
    dspark_target_attn_input: bool = True
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    @property
    def has_engram(self) -> bool:
        return bool(self.engram_layer_ids)

    @property
    def has_drafter(self) -> bool:
        return self.num_nextn_predict_layers > 0
