"""A drafter that knows its target: a loaded model is changed until its drafts are as good as one wants.

For tests and benchmarks of speculative decoding, where no trained drafter is at hand. Knows: which parameters
carry what the layers add to the stream. Does not know: files, engines.

Without anything added, the last hidden row of a token is its normed embedding, so the target is a first-order
chain, and the drafter's Markov head can hold exactly that chain. The costs of a step are those of the model.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.model.block import Block
from deepinfer_ray.model.moe import PackedExperts, StackedExperts
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.ops.formats import bf16_round
from deepinfer_ray.ops.norm import rms_norm

CONFIDENCE_LOGIT = 3.0
"""What the confidence head of a twin says of every draft: 95 %."""


@torch.no_grad()
def make_markov_twin(model: TextModel, share: float = 0.0) -> None:
    """Scale what attention, experts and Engram add by `share` and teach the drafter the chain that is left.

    In place. share: 0 = drafts are almost always right; the larger, the more the target depends on its whole
    context and the more drafts are wrong. Needs a model with its drafter and stacked experts.
    """
    drafter = model.drafter
    if drafter is None:
        raise ValueError("the model was loaded without its drafter")
    for block in model.blocks:
        assert isinstance(block, Block)
        _quieten(block, share)
    hidden = rms_norm(model.embed.float(), model.head.norm, drafter.eps)
    ones = torch.ones(hidden.shape[0], 1, device=hidden.device)
    drafter.markov_embed = _fixed(torch.cat((bf16_round(hidden), ones), 1).bfloat16())
    drafter.markov_head = _fixed(torch.cat((model.head.weight, torch.zeros_like(ones)), 1))
    drafter.norm.zero_()  # the block itself says nothing: the Markov term is the whole distribution
    confidence = torch.zeros(2 * hidden.shape[1] + 1, device=hidden.device)
    confidence[-1] = CONFIDENCE_LOGIT
    drafter.confidence = _fixed(confidence)


def _quieten(block: Block, share: float) -> None:
    block.attn.wo_b.mul_(share)
    experts = block.ffn.experts
    if isinstance(experts, PackedExperts):
        raise ValueError(
            "packed experts cannot be scaled; load the model with a larger dequantization budget"
        )
    assert isinstance(experts, StackedExperts)
    experts.w2.mul_(share)
    if block.ffn.shared_w2 is not None:
        block.ffn.shared_w2.mul_(share)
    if block.engram is not None:
        block.engram.wkv.mul_(share)


def _fixed(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=False)
