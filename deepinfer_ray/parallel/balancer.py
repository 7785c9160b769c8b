"""The balancing policy: token counts of past steps to a placement of experts. Pure functions of integers.

Knows: the two greedy phases of spec/distributed.md §4.4–4.5 in float32, the figures by which a placement is
judged (§4.8–4.9). Does not know: ranks as processes, how counts were gathered.

Sums over the window run in step order: where two choices are level up to rounding, another order may take
the other one and end elsewhere. So one rank decides and sends the result; agreement never rests on rounding.

Shape letters: W steps of the window, Y layers, L logical experts, X redundant slots, P slots, E ranks.
"""

from __future__ import annotations

import numpy as np

from deepinfer_ray.parallel.expert_map import ExpertMap

TIE = np.float32(1e-4)
"""Times the expert's index, added to a load in phase A: among equals the higher index counts as hotter."""


def balance(tokens_WYL: np.ndarray, ep_size: int, num_extra: int) -> ExpertMap:
    """The placement for these counts (int, already summed over the ranks), every layer by itself."""
    if tokens_WYL.ndim != 3 or 0 in tokens_WYL.shape:
        raise ValueError(
            f"token counts must be [steps, layers, experts], none of them 0, got {tokens_WYL.shape}"
        )
    layers = [balance_layer(tokens_WYL[:, layer], ep_size, num_extra) for layer in range(tokens_WYL.shape[1])]
    made = ExpertMap(ep_size, *(np.stack(tables) for tables in zip(*layers, strict=True)))
    made.check_integrity()
    return made


def balance_layer(
    tokens_WL: np.ndarray, ep_size: int, num_extra: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(physical_to_logical [P], logical_to_physical [L, X + 1], logical_count [L]) of one layer, int32."""
    slots, counts = assign_replicas(tokens_WL, num_extra)
    if len(slots) % ep_size:
        raise ValueError(f"(L + X) mod E = {len(slots)} mod {ep_size} must be 0")
    places = np.arange(len(slots))
    if len(slots) > ep_size:
        places = place_slots(tokens_WL, slots, counts, ep_size)
    to_logical = np.empty(len(slots), np.int32)
    to_logical[places] = slots
    to_physical = np.full((len(counts), num_extra + 1), -1, np.int32)
    seen = np.zeros(len(counts), np.int64)
    for expert, place in zip(slots.tolist(), places.tolist(), strict=True):
        to_physical[expert, seen[expert]] = place
        seen[expert] += 1
    return to_logical, to_physical, counts


def assign_replicas(tokens_WL: np.ndarray, num_extra: int) -> tuple[np.ndarray, np.ndarray]:
    """Phase A: (expert of each unplaced slot [P], replicas of each expert [L]), int32.

    Each round gives a replica to the expert that lowers Σ over steps of the hottest replica's load most:
      u[w,e] = (t[w,e] + e·1e-4) / cnt[e],  m_w = argmax_e u[w,e]
      V[w,j] = u[w,m_w], and for j = m_w  max(t[w,j] / (cnt[j] + 1), max_{e != j} u[w,e])
      choice = argmin_j Σ_w V[w,j], the lowest j among equals
    """
    W, L = tokens_WL.shape
    tokens = tokens_WL.astype(np.float32)
    biased = tokens + np.arange(L, dtype=np.float32) * TIE
    load = biased.copy()
    counts = np.ones(L, np.int32)
    slots = np.concatenate((np.arange(L, dtype=np.int32), np.zeros(num_extra, np.int32)))
    steps = np.arange(W)
    for i in range(num_extra):
        hottest = load.argmax(1)
        top = load[steps, hottest]
        load[steps, hottest] = -np.inf
        second = load.max(1)
        load[steps, hottest] = top
        relieved = np.maximum(tokens[steps, hottest] / (counts[hottest] + 1).astype(np.float32), second)
        # Only the hottest of some step can lower the sum; all others share the value of the last column.
        candidates = np.unique(hottest)
        values = np.where(hottest[:, None] == np.append(candidates, -1), relieved[:, None], top[:, None])
        sums = _sum_steps(values)
        best = int(sums[:-1].argmin())
        choice = int(candidates[best])
        if sums[-1] <= sums[best]:
            choice = min(choice, _lowest_missing(candidates, L))
        slots[L + i] = choice
        counts[choice] += 1
        load[:, choice] = biased[:, choice] / np.float32(counts[choice])
    return slots, counts


def place_slots(tokens_WL: np.ndarray, slots: np.ndarray, counts: np.ndarray, ep_size: int) -> np.ndarray:
    """Phase B: int64 [P], the final slot of each slot of phase A.

    Slots in descending total load (stable) go to the rank with the least Σ_w max(load[r,w] + v[w], peak[w]),
    the lowest rank among equals: Σ over steps of the busiest rank's load stays small.
    """
    W, _ = tokens_WL.shape
    capacity = len(slots) // ep_size
    share = tokens_WL.astype(np.float32) / counts.astype(np.float32)
    weight = tokens_WL.sum(0, dtype=np.int64).astype(np.float32) / counts.astype(np.float32)
    load = np.zeros((W, ep_size), np.float32)
    peak = np.zeros((W, 1), np.float32)
    occupied = np.zeros(ep_size, np.int64)
    places = np.empty(len(slots), np.int64)
    for slot in np.argsort(-weight[slots], kind="stable"):
        share_W1 = share[:, slots[slot], None]
        score = _sum_steps(np.maximum(load + share_W1, peak))
        score[occupied == capacity] = np.inf
        rank = int(score.argmin())
        places[slot] = rank * capacity + occupied[rank]
        occupied[rank] += 1
        np.add(load[:, rank], share_W1[:, 0], out=load[:, rank])
        np.maximum(peak, load[:, rank, None], out=peak)
    return places


def _sum_steps(values: np.ndarray) -> np.ndarray:
    """float32 sum over the first axis, strictly in order (`sum` may pair terms, depending on the shape)."""
    last: np.ndarray = np.add.accumulate(values, axis=0, dtype=np.float32)[-1]
    return last


def _lowest_missing(ascending: np.ndarray, end: int) -> int:
    """The least index in [0, end) that is not listed, or `end`."""
    differs = np.flatnonzero(ascending != np.arange(len(ascending)))
    return int(differs[0]) if differs.size else min(len(ascending), end)


# ---- judging a placement


def rank_loads(tokens_WYL: np.ndarray, placement: ExpertMap) -> np.ndarray:
    """float64 [W, Y, E]: tokens of each rank if an expert's tokens divide evenly over its replicas."""
    share = tokens_WYL / placement.logical_count
    index = np.broadcast_to(
        placement.physical_to_logical, (len(tokens_WYL), *placement.physical_to_logical.shape)
    )
    slots = np.take_along_axis(share, index.astype(np.int64), axis=2)
    return slots.reshape(*slots.shape[:2], placement.ep_size, -1).sum(3)


def objective(loads_WYE: np.ndarray) -> np.ndarray:
    """[Y]: Σ over steps of the busiest rank's load, what both phases keep small."""
    total: np.ndarray = loads_WYE.max(2).sum(0)
    return total


def imbalance(loads_WYE: np.ndarray) -> float | None:
    """Σ of the busiest rank's load / Σ of the mean rank's, over steps and layers; None without a token."""
    mean = loads_WYE.mean(2).sum()
    return float(loads_WYE.max(2).sum() / mean) if mean else None


def rank_balance(loads_WYE: np.ndarray) -> float:
    """Mean rank load / (mean of the busiest rank's load + 1e-6), at most 1: the inverse notion, for logs."""
    return float(loads_WYE.mean() / (loads_WYE.max(2).mean() + 1e-6))
