"""Token masks on a device: the bits of a CPU, in the release's vocabulary, and nobody waits for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine.logits_processors import TokenMasks
from deepinfer_ray.engine.utf8_guard import words_of
from deepinfer_ray.ops.sync_guard import forbid_sync

pytestmark = pytest.mark.gpu

VOCAB = 129280


@pytest.mark.parametrize("vocab", [77, VOCAB])
def test_masks_give_the_bits_of_a_cpu_without_a_wait(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    rows = random.permutation(320)[:200].astype(np.int64)
    words = np.stack([words_of(np.flatnonzero(random.random(vocab) < 0.3), vocab) for _ in rows])
    masks = TokenMasks(rows, words)
    logits = torch.randn(320, vocab, generator=torch.Generator().manual_seed(vocab))
    on_device, staging = logits.to("cuda"), Staging("cuda")
    masks.apply(logits)
    with torch.inference_mode(), forbid_sync():
        masks.apply(on_device, staging)
    assert torch.equal(on_device.cpu(), logits)


def test_masks_of_a_large_step_cost_little() -> None:
    """512 rows of the release, far below the time of a decode step."""
    words = np.full((512, VOCAB // 32), 0x0F0F0F0F, np.int32)
    masks, staging = TokenMasks(np.arange(512), words), Staging("cuda")
    logits = torch.zeros(512, VOCAB, device="cuda")
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        masks.apply(logits, staging)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    print(f"512 masked rows: {min(times):.2f} ms")
    assert min(times) < 20.0
