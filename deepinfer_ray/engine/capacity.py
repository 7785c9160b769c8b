"""How many blocks and state slots a byte budget pays for (spec/engine.md §10.2, §10.3).

Knows: sizes of one block and one slot, the options that bend the division. Does not know: devices, how a
budget was found, other ranks (`phase_vote.agree_num_blocks` takes the smallest count of them).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Capacity:
    """Pool sizes of one rank; block 0 and slot 0, which belong to nobody, are counted."""

    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int
    num_snapshots: int = 0
    """Slots beyond `num_slots`, for the rings of kept prefixes."""

    @property
    def total_bytes(self) -> int:
        slots = self.num_slots + self.num_snapshots
        return self.num_blocks * self.block_bytes + slots * self.slot_bytes

    @property
    def tokens(self) -> int:
        """Tokens that all usable blocks hold."""
        return (self.num_blocks - 1) * 128


def useful_blocks(config: EngineConfig) -> int:
    """Blocks beyond which a rank could not use more: every slot at its longest, and the 0.8 rule."""
    per_sequence = -(-(config.runtime_max_model_len + 1) // 128)
    by_rule = -(-config.runtime_max_model_len * 10 // (8 * 128)) + 1
    return max(per_sequence * (config.num_state_slots - 1), by_rule) + 2


def useful_snapshots(config: EngineConfig) -> int:
    """Kept prefixes beyond which a rank gains little: a few more than the groups among its waiting rows."""
    if not (config.cache.prefix_reuse and config.cache.prefix_budget_fraction):
        return 0
    return max(4, config.scheduler.max_seqs // 4) if config.scheduler.role != "completion" else 0


def plan_capacity(layout: CacheLayout, config: EngineConfig, budget_bytes: int) -> Capacity:
    """Slots first, blocks from what is left, down to an even number and to no more than can be used; before
    the blocks, copies of kept prefixes' rings up to their share of what is left.

    `ConfigError` if the slots alone exceed the budget, if fewer than two blocks remain, or if a sequence of
    maximal length does not fit in 0.8 of the blocks.
    """
    num_slots = config.num_state_slots
    slots_bytes = num_slots * layout.slot_bytes
    num_snapshots = useful_snapshots(config)
    num_blocks = config.cache.num_blocks_override
    if num_blocks is None:
        left = budget_bytes - slots_bytes - config.cache.graph_reserve_bytes
        if left < 2 * layout.block_bytes:
            raise ConfigError(
                f"the cache budget of {budget_bytes} bytes holds no blocks: {num_slots} state slots of "
                f"{layout.slot_bytes} bytes take {slots_bytes}, a block takes {layout.block_bytes}; lower "
                f"scheduler.max_seqs = {config.scheduler.max_seqs} or raise the budget "
                "(cache.cpu_budget_bytes on CPU, cache.memory_utilization on GPU)"
            )
        num_snapshots = min(
            num_snapshots, int(left * config.cache.prefix_budget_fraction) // layout.slot_bytes
        )
        left -= num_snapshots * layout.slot_bytes
        num_blocks = min(left // layout.block_bytes, useful_blocks(config)) // 2 * 2
    config.check_capacity(num_blocks)
    return Capacity(num_blocks, num_slots, layout.block_bytes, layout.slot_bytes, num_snapshots)
