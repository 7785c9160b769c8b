"""`ModelRanks`: what one rank's model has to know of the others, to be built and to run.

Knows: which expert slots and table rows are this rank's, which transport carries expert rows. Does not know:
weights, schedulers, where the groups come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.all_to_all import AllToAllExchange, RowFormat
from deepinfer_ray.parallel.deep_ep import DeepEPBuffer, DeepEPExchange
from deepinfer_ray.parallel.expert_exchange import ExpertExchange, LocalExchange
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.rank_group import RankGroup, SingleRank


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """The groups of a rank. ep: shares the experts. engram: shares the tables. cp: shares prefill rows.

    extra_experts: redundant slots that are asked for (rounded up so that slots divide over the ranks).
    deep_ep: the process's buffer where DeepEP carries expert rows.
    """

    ep: RankGroup = field(default_factory=SingleRank)
    engram: RankGroup = field(default_factory=SingleRank)
    cp: RankGroup = field(default_factory=SingleRank)
    extra_experts: int = 0
    deep_ep: DeepEPBuffer | None = None

    def placement(self, num_layers: int, num_experts: int) -> ExpertMap:
        """Where the experts of equally laid out layers lie at the start."""
        if self.ep.size == 1:
            return ExpertMap.initial(num_layers, num_experts, 1)
        return ExpertMap.initial(num_layers, num_experts, self.ep.size, self.extra_experts)

    def exchange(self, num_local: int, row_format: RowFormat) -> ExpertExchange:
        """The transport of one layer with `num_local` slots a rank."""
        if self.ep.size == 1:
            return LocalExchange(num_local)
        if self.deep_ep is not None and row_format == "fp8":
            return DeepEPExchange(self.deep_ep, self.ep.size, num_local)
        return AllToAllExchange(self.ep, num_local, row_format)


def equal_layers(counts: list[int], what: str) -> int:
    """The one number of experts of layers that are balanced together; `ConfigError` if there are several."""
    if len(set(counts)) != 1:
        raise ConfigError(f"{what} must all have the same number of experts to be placed together: {counts}")
    return counts[0]
