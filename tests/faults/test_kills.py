"""The real job on several machines, killed at random moments: every row once, each as if nothing had been."""

from __future__ import annotations

import json

import pytest

VICTIMS = ["driver", "rank", "raylet"]

pytestmark = pytest.mark.ray


def assert_as_if_nothing_had_been(kill):
    assert kill["lost"] == 0, kill
    assert kill["duplicated"] == 0, kill
    assert kill["different"] == 0, kill
    assert kill["left"] == [], kill


@pytest.mark.slow
@pytest.mark.parametrize(("victims", "seed"), [(VICTIMS, 1), (VICTIMS[::-1], 2)])
def test_driver_rank_and_machine_of_one_job_die(lab, victims, seed):
    kill = lab("strike", victims=victims, seed=seed)
    assert_as_if_nothing_had_been(kill)
    assert [moment.split()[0] for moment in kill["at"]] == victims


@pytest.mark.soak
def test_a_hundred_kills(lab, capsys):
    kills = []
    for index in range(100):
        kills.append(lab("strike", victims=[VICTIMS[index % 3]], seed=index))
        assert_as_if_nothing_had_been(kills[-1])
    rows = lab("figures", kills=kills)
    assert sum(row["kills"] for row in rows) == 100
    with capsys.disabled():
        print(json.dumps(rows))
