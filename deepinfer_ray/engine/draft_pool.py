"""The drafts of a rank's sequences between the step that makes them and the one that verifies them.

Knows: slots of N rows on the device (speculative spec §3.6). Does not know: who holds a slot (the scheduler),
how drafts are made or judged.

Slot 0 belongs to nobody and holds what a sequence without drafts verifies: the last id of the vocabulary, of
which its draft distribution is sure. That is exact, as with any other draft: it is accepted as often as the
target gives it.

Shape letters: n sequences, N drafts, V vocabulary.
"""

from __future__ import annotations

import torch


class DraftPool:
    """ids int64 [rows], logprobs float32 [rows, V], confidence float32 [rows]; row = slot · N + place.

    One slot behind the last takes what is written for slot 0.
    """

    def __init__(self, num_slots: int, drafts: int, vocab_size: int, device: torch.device | str) -> None:
        """num_slots: slots that sequences can hold, numbered from 1."""
        self.drafts, self.nowhere = drafts, num_slots + 1
        rows = (num_slots + 2) * drafts
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self.confidence = torch.zeros(rows, dtype=torch.float32, device=device)
        self.ids[:drafts] = vocab_size - 1
        self.logprobs[:drafts] = float("-inf")
        self.logprobs[:drafts, vocab_size - 1] = 0.0
        self.confidence[:drafts] = 1.0

    @staticmethod
    def bytes_of(num_slots: int, drafts: int, vocab_size: int) -> int:
        """Device bytes of a pool; 0 without drafts."""
        return (num_slots + 2) * drafts * (4 * vocab_size + 12)

    def write_rows(self, slots_n: torch.Tensor, place: int) -> torch.Tensor:
        """int64 [n] rows for draft `place` of slots [n]."""
        return torch.where(slots_n > 0, slots_n, self.nowhere) * self.drafts + place
