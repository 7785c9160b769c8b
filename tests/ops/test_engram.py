"""Engram: constants, windows, hashes and the gate against golden and against the printed rows."""

import numpy as np
import pytest
import torch

from deepinfer_ray.config.engram import EngramPlan, engram_multipliers, engram_primes
from deepinfer_ray.ops.engram import DEAD, EngramHash, gated_update, ngram_window
from deepinfer_ray.ops.numerics import Numerics


@pytest.fixture(scope="module")
def released() -> EngramPlan:
    primes = engram_primes(16_000_000, 2, 3, 8)
    flat = [[p for row in layer for p in row] for layer in primes]
    return EngramPlan(
        layer_ids=(1, 14),
        max_ngram=4,
        heads=8,
        head_dim=256,
        pad_token_id=2,
        compressed_vocab_size=99092,
        primes=primes,
        offsets=tuple(tuple(sum(row[:c]) for c in range(24)) for row in flat),
        multipliers=tuple(engram_multipliers(layer, 99092, 4) for layer in (1, 14)),
        rows=tuple(sum(row) for row in flat),
    )


def test_golden_windows_and_rows(vectors, released):
    v = vectors("engram")
    assert torch.equal(torch.tensor(released.primes), v["primes"].long())
    assert torch.equal(torch.tensor(released.offsets), v["offsets"].long())
    assert torch.equal(torch.tensor(released.multipliers), v["multipliers"])
    compressed = v["compressed_ids"].numpy()
    grams = ngram_window(compressed, np.arange(60), None, 4, 2)
    assert torch.equal(torch.from_numpy(grams), v["ngram_ids"].long())
    image = v["compressed_ids"] == DEAD
    rows = EngramHash(released)(torch.from_numpy(grams), image)
    assert rows[:, image].eq(-1).all()
    text = ~image
    assert torch.equal(rows.permute(1, 0, 2)[text], v["hash_ids"].long()[text])


COLUMNS = (0, 7, 8, 16, 23)
PRINTED = [
    (0, 0, (0, 2, 2, 2), (5702652, 121476532, 131476717, 257520185, 380066193)),
    (0, 3, (300, 200, 100, 0), (10182112, 115738354, 141757364, 262231359, 370886073)),
    (0, 4, (99091, 300, 200, 100), (412134, 117204691, 139682732, 263730564, 372183708)),
    (1, 0, (0, 2, 2, 2), (14361964, 120604547, 132225184, 261362261, 372375971)),
    (1, 3, (300, 200, 100, 0), (2374165, 116005034, 133128642, 258715012, 382915207)),
    (1, 4, (99091, 300, 200, 100), (2594078, 117965591, 138110919, 269824145, 379120946)),
]


@pytest.mark.parametrize(("layer", "position", "window", "expected"), PRINTED)
def test_printed_rows(released, layer, position, window, expected):
    grams = ngram_window(np.array([0, 100, 200, 300, 99091, 2]), np.arange(6), None, 4, 2)
    assert tuple(grams[position]) == window
    rows = EngramHash(released)(torch.from_numpy(grams))
    assert tuple(rows[layer, position, list(COLUMNS)].tolist()) == expected


def test_printed_rows_behind_an_image(released):
    grams = ngram_window(np.array([0, 100, DEAD, 300, 400]), np.arange(5), None, 4, 2)
    rows = EngramHash(released)(torch.from_numpy(grams))[0]
    assert grams[3].tolist() == [300, 2, 2, 2]
    assert rows[3, [0, 8, 23]].tolist() == [12107079, 132941077, 373576841]
    assert grams[4].tolist() == [400, 300, 2, 2]
    assert rows[4, [0, 8, 23]].tolist() == [205356, 133416288, 372720985]


def test_windows_of_many_sequences_equal_one_by_one():
    rng = np.random.default_rng(0)
    table = rng.integers(-1, 50, (6, 40))
    rows, positions = rng.integers(0, 6, 200), rng.integers(0, 40, 200)
    got = ngram_window(table, positions, rows, 4, 9)
    for query, (row, position) in enumerate(zip(rows, positions, strict=True)):
        blocked, want = False, []
        for back in range(4):
            blocked = blocked or position - back < 0 or table[row, position - back] < 0
            want.append(9 if blocked else table[row, position - back])
        assert got[query].tolist() == want


def test_golden_gate(vectors, bf16_steps):
    v, b = vectors("engram"), Numerics().b
    kv = v["gate.kv"].float()
    weight = v["gate.q_weight"].float() * v["gate.k_weight"].float()
    x = v["gate.hidden"].float()
    image = ~v["gate.token_mask"]
    out = b(gated_update(x, kv[:, :4], kv[:, 4], weight, 1e-20, image))
    assert torch.equal(out[image], x[image])
    zero = (x == 0).all(-1).all(-1)
    assert zero.sum() == 1, "one row is all zero: copysign gives the gate logistic(+0.001)"
    assert bf16_steps(out, v["gate.out"]).max() <= 1


def test_gate_rows_do_not_depend_on_their_number():
    torch.manual_seed(0)
    x, key, value = torch.randn(80, 4, 64), torch.randn(80, 4, 64), torch.randn(80, 64)
    weight = torch.randn(4, 64)
    want = gated_update(x, key, value, weight, 1e-20)
    for rows in range(1, 71):
        got = gated_update(x[:rows], key[:rows], value[:rows], weight, 1e-20)
        assert torch.equal(got, want[:rows]), rows
