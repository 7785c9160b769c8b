"""What a fleet says about its ranks: entries for programs, lines for people.

Knows: gangs, the router's books, last pulses. Does not know: Ray, why somebody asks.
"""

from __future__ import annotations

from typing import Any

from deepinfer_ray.fleet.gang import Gang
from deepinfer_ray.fleet.router import Router
from deepinfer_ray.fleet.watch import Watch


def rank_entries(gang: Gang, router: Router, watch: Watch) -> list[dict[str, Any]]:
    """One JSON-able entry a rank, with stage, place, pulse and rows; ranks without an actor too."""
    entries = []
    for number in gang.numbers:
        member = next((rank for rank in gang.ranks if rank.rank == number), None)
        load, beat = router.load(number), watch.beat(number)
        entries.append(
            {
                "rank": number,
                "gang": gang.index,
                "generation": gang.generation,
                "stage": gang.stage,
                "node": member.where.address if member else None,
                "node_id": member.where.node_id if member else None,
                "pid": member.where.pid if member else None,
                "phase": beat.phase if beat else None,
                "step": beat.step if beat else None,
                "in_flight": len(load.in_flight) if load else 0,
                "done": load.done if load else 0,
            }
        )
    return entries


def last_phases(gang: Gang, watch: Watch) -> str:
    """What each rank of a gang last said about itself: who hangs, and who merely waits for it."""
    if len(gang.ranks) == 1:
        return ""
    beats = [(rank, watch.beat(rank.rank)) for rank in gang.ranks]
    lines = [f"\n  {rank}: {beat if beat else 'never heard of'}" for rank, beat in beats]
    return "; the ranks of its gang:" + "".join(lines)
