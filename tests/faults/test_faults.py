"""Deaths under the real job and under a bare fleet, on the fake machines of one cluster.

The job is killed at random moments and comes out as if nothing had been: every row once, each as in a run
without kills. The fleet may not lose a single rank, and machines die or are announced to go.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.model.synthetic import make_checkpoint

pytestmark = pytest.mark.ray

VICTIMS = ["driver", "rank", "raylet"]


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
    assert lab("figures", kills=[{**kill, "victims": ["rank"]}])[0]["different"] == 0


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


def test_a_lost_machine_costs_neither_the_budget_nor_its_rows(lab):
    found = lab("lose_a_machine", rows=60, row_ms=50)
    assert found["rows"] == 60
    assert found["restarts"] == 1
    assert found["attempts"][-1] == 2, "the rows in flight were tried again"
    assert found["attempts"].count(2) <= 4
    assert found["held"] == []


def test_a_drained_machine_ends_its_rows_and_the_rank_moves(lab):
    found = lab("drain_a_machine", rows=60, row_ms=100, seconds=60)
    assert found["rows"] == 60
    assert found["attempts"] == [1] * 60, "what was in flight had time to end"
    assert found["restarts"] == 1
    assert found["moved"]
    assert found["gone"], "nothing of ours holds the machine"
    assert found["held"] == []


def test_rows_that_outlast_their_machine_run_elsewhere(lab):
    found = lab("drain_a_machine", rows=12, row_ms=1500, seconds=6)
    assert found["rows"] == 12
    assert 1 <= found["attempts"].count(2) <= 4
    assert found["restarts"] == 1
    assert found["moved"]
    assert found["held"] == []


@pytest.mark.slow
def test_one_row_of_64_kills_its_rank(lab, tmp_path):
    """The stub engine kills its process over a prompt that begins with 1, and turns round all others."""
    prompts = [[0, row + 3, 9] for row in range(64)]
    prompts[37][0] = 1
    table = pa.table({"id": [f"r{row}" for row in range(64)], "ids": prompts})
    pq.write_table(table, tmp_path / "in.parquet")
    flags = {
        "--model": str(make_checkpoint(tmp_path / "model", "tiny", layers=6, experts=4)),
        "--input": [str(tmp_path / "in.parquet")],
        "--output": str(tmp_path / "out"),
        "--id-column": "id",
        "--token-ids-column": "ids",
        "--dp": 2,
    }
    found = lab("poison", flags=flags)
    assert found["code"] == 0, found["log"]
    assert (found["summary"]["ok"], found["summary"]["errors"]) == (63, 1)
    assert found["summary"]["error_codes"] == {"rank_killer": 1}
    assert found["held"] == []
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["row_id"] for row in rows] == table["id"].to_pylist()
    assert [row["token_ids"] for row in rows if row["row_id"] != "r37"] == [
        prompt[::-1] for row, prompt in enumerate(prompts) if row != 37
    ]
    assert "this row killed a rank each time it ran alone" in rows[37]["error"]
