"""Rank actors on a real local cluster, with a stub engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray.util import placement_group_table

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.errors import CheckpointError, ConfigError, PlacementError, RankFailure
from deepinfer_ray.fleet.backend import Backend, WorkItem, WorkResult
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.gang import Gang
from deepinfer_ray.fleet.generate import FleetGenerator
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.placement import Placement
from deepinfer_ray.fleet.scratch import sweep
from deepinfer_ray.fleet.topology import GPU_DOMAIN_LABEL, NODE_LABEL, PlacementPlan
from deepinfer_ray.fleet.watch import Patience

pytestmark = pytest.mark.ray

GREEDY = SamplingParams(temperature=0)


def rows(prompts: list[Any]) -> list[WorkItem]:
    return [WorkItem(key, prompt, GREEDY, seed=key) for key, prompt in enumerate(prompts)]


def run(
    fleet: RayFleet, items: list[WorkItem], *, on_poll: Callable[[list[WorkResult]], None] | None = None
) -> dict[int, WorkResult]:
    """Feed as the job does: never more than wanted. Every key must come back once."""
    todo, results, deadline = list(reversed(items)), {}, time.monotonic() + 60
    while len(results) < len(items):
        assert time.monotonic() < deadline, f"{len(results)} of {len(items)} rows, {fleet.status()}"
        fleet.submit([todo.pop() for _ in range(min(fleet.wanted(), len(todo)))])
        for result in fleet.poll(0.5):
            assert result.key not in results, f"row {result.key} came back twice"
            results[result.key] = result
        if on_poll:
            on_poll(list(results.values()))
    fleet.router.check_integrity()
    return results


def fleet_of(stub: ModuleType, dp: int, config: dict[str, Any] | None = None, **options: Any) -> RayFleet:
    chosen = FleetOptions(**{"cpus_per_rank": 0.5, **options})
    return RayFleet("no-such-model", config, dp, device="cpu", engine_factory=stub.make, options=chosen)


def test_two_ranks_give_every_row(cluster: Any, stub: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "ranks"
    prompts = [stub.prompt(stub.ECHO, 10, key) for key in range(60)]
    prompts[7] = stub.prompt(stub.REFUSE, 1)
    prompts[8] = stub.prompt(stub.TRIP, 1)
    with fleet_of(stub, 2, {"log": str(log)}) as fleet:
        assert isinstance(fleet, Backend)
        results = run(fleet, rows(prompts))
        status = fleet.status()
    assert sorted(results) == list(range(60))
    assert results[3].result.token_ids.tolist() == [3, 10, stub.ECHO]
    assert results[7].result.error_code == "prompt_too_long"
    assert results[8].result.error_code == "internal"
    assert results[8].result.error == "ZeroDivisionError: the stub tripped over the row"
    assert {result.attempts for result in results.values()} == {1}
    assert [rank["stage"] for rank in status["ranks"]] == ["up", "up"]
    assert all(rank["done"] > 0 for rank in status["ranks"]), "a rank got nothing"
    assert status["restarts"] == 0
    started = [line.split() for line in log.read_text().splitlines()]
    assert sorted((rank, threads) for rank, _, _, threads in started) == [("0", "1"), ("1", "1")]


def test_a_slow_rank_holds_no_rows(cluster: Any, stub: ModuleType) -> None:
    """Rank 0 takes 500 ms a row and has room for 2; were rows dealt out, 20 of them would wait behind it."""
    config = {"room": 2, "delay_s": {0: 0.5}}
    with fleet_of(stub, 2, config) as fleet:
        results = run(fleet, rows([stub.prompt(stub.SLOW, 10) for _ in range(40)]))
        by_rank = Counter(result.result.text for result in results.values())
        done = {rank["rank"]: rank["done"] for rank in fleet.status()["ranks"]}
    assert sum(done.values()) == 40
    assert done[0] <= 8, f"the slow rank ran {done[0]} of 40 rows"
    assert sorted(by_rank.values()) == sorted(done.values())


def test_killed_rank_is_rebuilt_and_its_rows_are_redone(cluster: Any, stub: ModuleType) -> None:
    killed: list[int] = []
    with fleet_of(stub, 2) as fleet:

        def kill_one(results: list[WorkResult]) -> None:
            if not killed and len(results) >= 5:
                rank = fleet.status()["ranks"][1]
                assert rank["in_flight"] > 0
                killed.append(rank["pid"])
                os.kill(rank["pid"], signal.SIGKILL)

        results = run(fleet, rows([stub.prompt(stub.SLOW, 20) for _ in range(40)]), on_poll=kill_one)
        status = fleet.status()
    assert killed
    assert sorted(results) == list(range(40))
    attempts = Counter(result.attempts for result in results.values())
    assert set(attempts) == {1, 2}
    assert attempts[2] <= 8, "only rows in flight are redone"
    assert status["restarts"] == 1
    assert [rank["generation"] for rank in status["ranks"]] == [0, 1]
    assert all(result.result.finish_reason == "stop" for result in results.values())


def test_a_row_that_kills_ranks_is_found_and_the_others_end(cluster: Any, stub: ModuleType) -> None:
    prompts = [stub.prompt(stub.ECHO, key) for key in range(6)]
    prompts[2] = stub.prompt(stub.KILL, 2)
    with fleet_of(stub, 1, {"room": 4}) as fleet:
        results = run(fleet, rows(prompts))
    assert results[2].result.error_code == "rank_killer"
    assert results[2].result.finish_reason == "error"
    assert [results[key].result.error for key in (0, 1, 3, 4, 5)] == [None] * 5


def test_engine_exception_ends_the_rank_and_is_reported(
    cluster: Any, stub: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [stub.prompt(stub.BREAK, 1), stub.prompt(stub.ECHO, 2)]
    with fleet_of(stub, 1, {"room": 1}) as fleet:
        results = run(fleet, rows(prompts))
    assert results[0].result.error_code == "rank_killer"
    assert results[1].result.error is None
    assert "FloatingPointError: the stub engine broke" in caplog.text
    assert "in step" in caplog.text, "the traceback is part of the report"


def test_impossible_placement_names_demand_and_supply(cluster: Any, stub: ModuleType) -> None:
    fleet = fleet_of(stub, 2, cpus_per_rank=3.0, patience=Patience(placement=2.0))
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        fleet.start()
    assert time.monotonic() - started < 30
    text = str(caught.value)
    assert "demand: 1 × {CPU: 3}, STRICT_PACK = {CPU: 3}" in text
    assert "CPU 1 free of 4; holds 0 now, 1 when empty" in text
    assert "--dp" in text


def test_ranks_stand_only_where_labels_say(cluster: Any, stub: ModuleType) -> None:
    here = cluster.get_runtime_context().get_node_id()
    with fleet_of(stub, 2, label_selector={NODE_LABEL: here}) as fleet:
        assert {rank["node_id"] for rank in fleet.status()["ranks"]} == {here}
    elsewhere = fleet_of(stub, 1, label_selector={NODE_LABEL: f"!{here}"}, patience=Patience(placement=0.5))
    with pytest.raises(
        PlacementError, match=rf"where {NODE_LABEL} = !{here}(.|\n)*holds 0 now, 0 when empty"
    ):
        elsewhere.start()
    with pytest.raises(ConfigError, match=r"parallel\.label_selector = .* is refused by Ray"):
        fleet_of(stub, 1, label_selector={NODE_LABEL: "in(a"}).start()


def test_a_machine_without_gpus_refuses_cuda_ranks(cluster: Any, stub: ModuleType) -> None:
    fleet = RayFleet(
        "m", None, 2, device="cuda", engine_factory=stub.make,
        options=FleetOptions(patience=Patience(placement=0.5)),
    )  # fmt: skip
    with pytest.raises(PlacementError, match=r"2 groups of 1 × \{CPU: 1, GPU: 1\}, STRICT_PACK"):
        fleet.start()


@pytest.mark.parametrize(
    ("fail", "error", "text"),
    [
        ("checkpoint", CheckpointError, "no-such-model: model.safetensors is missing"),
        ("bug", RankFailure, r"rank 0 \(pid \d+ on .*\) could not build its engine: KeyError"),
    ],
)
def test_failure_to_build_the_engine_keeps_its_class(
    cluster: Any, stub: ModuleType, fail: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fleet_of(stub, 1, {"fail": fail}).start()


def test_ranks_that_always_die_exhaust_the_budget(cluster: Any, stub: ModuleType) -> None:
    with pytest.raises(RankFailure, match="died 2 times without a row ending in between"):
        fleet_of(stub, 1, {"fail": "die"}, max_restarts=1).start()


def test_a_domain_that_no_machine_names_stays_unplaced_and_is_removed(cluster: Any) -> None:
    plan = PlacementPlan(
        ({"CPU": 0.5},), topology_strategy={"ray.io/node-id": "PACK", GPU_DOMAIN_LABEL: "STRICT_PACK"}
    )
    placement = Placement(plan, "nowhere")
    time.sleep(0.5)
    assert not placement.placed()
    assert placement.remove()
    assert placement.remove(), "a second removal is harmless"
    assert f"STRICT_PACK within one {GPU_DOMAIN_LABEL}" in str(placement.failure(0.5))


def test_generator_keeps_input_order_over_several_calls(cluster: Any, stub: ModuleType) -> None:
    options = FleetOptions(cpus_per_rank=0.5)
    with FleetGenerator(
        "m", {"room": 3}, dp=2, device="cpu", engine_factory=stub.make, options=options
    ) as ranks:
        for size in (7, 0, 5):
            requests = [
                Request(stub.prompt(stub.SLOW, 30 - 3 * i, i), GREEDY, request_id=7) for i in range(size)
            ]
            results = ranks.run(requests)
            assert [int(result.token_ids[0]) for result in results] == list(range(size))
            assert {result.request_id for result in results} <= {7}
    ranks.close()


def test_ctrl_c_while_ranks_come_up_leaves_nothing(
    cluster: Any, stub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half built: one gang has its actor, the other not even its bundle. The fixture looks for leftovers."""
    advance, seen = Gang.advance, []

    def interrupted(gang: Gang) -> bool:
        seen.append(gang.stage)
        if len(seen) > 2 and gang.index == 1:
            raise KeyboardInterrupt
        return advance(gang)

    monkeypatch.setattr(Gang, "advance", interrupted)
    fleet = fleet_of(stub, 2)
    with pytest.raises(KeyboardInterrupt):
        fleet.start()
    assert [gang.stage for gang in fleet._gangs] == ["ended", "ended"]


def test_a_second_ctrl_c_still_leaves_nothing(
    cluster: Any, stub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, calls = Placement.remove, []

    def interrupted(placement: Placement) -> bool:
        calls.append(placement)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return remove(placement)

    monkeypatch.setattr(Placement, "remove", interrupted)
    fleet = fleet_of(stub, 2)
    fleet.start()
    with pytest.raises(KeyboardInterrupt):
        fleet.close()
    assert [gang.stage for gang in fleet._gangs] == ["ended", "ended"]


def test_fleet_states_are_checked(cluster: Any, stub: ModuleType) -> None:
    fleet = fleet_of(stub, 1)
    with pytest.raises(RuntimeError, match="not running; call start"):
        fleet.poll(0)
    fleet.close()
    fleet.close()
    with pytest.raises(RuntimeError, match="nothing after close"):
        fleet.submit([])


def test_the_grid_follows_the_engine_config(stub: ModuleType) -> None:
    assert RayFleet("m", EngineConfig(parallel={"dp": 2}), 2).grid.independent
    assert RayFleet("m", EngineConfig(parallel={"dp": 2, "ep": 2}), 1).grid.gangs() == [[0, 1]]
    split = EngineConfig(parallel={"dp": 4, "ep": 2, "engram": 2})
    assert RayFleet("m", split, 4).grid.gangs() == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match=r"\(C·D\) mod E = \(1·3\) mod 2 = 1, must be 0"):
        RayFleet("m", EngineConfig(parallel={"dp": 2, "ep": 2}), 3)


def test_stopped_process_is_noticed(cluster: Any, stub: ModuleType) -> None:
    """SIGSTOP: alive for the machine, silent for the fleet."""
    with fleet_of(stub, 1, patience=Patience(ping_after=0.5, silent=2.0)) as fleet:
        first = fleet.status()["ranks"][0]["pid"]
        os.kill(first, signal.SIGSTOP)
        results = run(fleet, rows([stub.prompt(stub.ECHO, 1)]))
        assert fleet.status()["ranks"][0]["pid"] != first
        assert not alive(first)
    assert results[0].attempts == 2


DRIVER = """
    import signal, sys
    import ray
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in whatever was started with `&`
    sys.path.insert(0, {tests!r})
    import stub_engine
    ray.cloudpickle.register_pickle_by_value(stub_engine)
    from deepinfer_ray.engine.request import SamplingParams
    from deepinfer_ray.fleet.backend import WorkItem
    from deepinfer_ray.fleet.fleet import RayFleet
    from deepinfer_ray.fleet.options import FleetOptions
    fleet = RayFleet("m", None, 2, device="cpu", engine_factory=stub_engine.make,
                     options=FleetOptions(address={address!r}, cpus_per_rank={cpus}, max_gangs={most}))
    try:
        with fleet:
            fleet.submit([WorkItem(k, stub_engine.prompt(5, 50), SamplingParams(), k) for k in range(1000)])
            while not fleet.poll(1.0) or ({most} and fleet.status()["ranks"][-1]["stage"] != "placing"):
                pass
            pids = [rank["pid"] for rank in fleet.status()["ranks"] if rank["pid"]]
            print(*pids, fleet.status()["ray_files"], flush=True)
            while True:
                fleet.poll(1.0)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def interrupted_driver(
    address: str | None, blow: int = signal.SIGINT, cpus: float = 0.5
) -> tuple[list[int], str, int]:
    """A driver gets a signal while rows are in flight: Ctrl-C with its whole process group, SIGKILL alone.

    Rank pids, the directory of its own cluster or "None", exit code. cpus: of each of its two ranks; with
    more than 1 on a cluster of 4 a third, which it may have then, waits for its place when the signal comes.
    """
    most = 3 if cpus > 1 else None
    code = textwrap.dedent(DRIVER).format(
        tests=str(Path(__file__).parent), address=address, cpus=cpus, most=most
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        assert driver.stdout is not None
        *pids, files = driver.stdout.readline().split()
        if blow == signal.SIGINT:
            os.killpg(driver.pid, blow)  # as a terminal does: the whole foreground group
        else:
            os.kill(driver.pid, blow)
        return list(map(int, pids)), files, driver.wait(40)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def processes_of(files: str) -> list[str]:
    """Command lines that name a cluster's directory."""
    commands = [command_line(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [command for command in commands if files in command]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_ctrl_c_leaves_nothing_on_a_foreign_cluster(cluster: Any) -> None:
    address = cluster.get_runtime_context().gcs_address
    pids, files, code = interrupted_driver(address)
    assert files == "None"
    assert code == 130
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a rank outlived its driver"
        time.sleep(0.05)
    assert cluster.cluster_resources()["CPU"] == 4, "the cluster itself goes on"


def test_kill_9_of_the_driver_leaves_nothing_on_a_foreign_cluster(cluster: Any) -> None:
    """Its ranks, and the placement group of a further gang that waits: Ray ends both with the driver."""

    def groups() -> set[str]:
        return {row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"}

    pids, _, code = interrupted_driver(cluster.get_runtime_context().gcs_address, signal.SIGKILL, cpus=2.0)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) or groups():
        assert time.monotonic() < deadline, f"still there: {groups()}"
        time.sleep(0.1)


def test_ctrl_c_ends_a_cluster_of_our_own() -> None:
    pids, files, code = interrupted_driver(None)
    assert code == 130
    assert not any(map(alive, pids))
    assert Path(files).name.startswith("dray-")
    assert not Path(files).exists(), "the cluster's files are gone too"
    assert not processes_of(files), "a process of the cluster lives on"


def test_kill_9_of_the_driver_ends_a_cluster_of_our_own() -> None:
    """The kernel tells the cluster's processes; the files go when the next driver starts."""
    pids, files, code = interrupted_driver(None, signal.SIGKILL)
    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) or processes_of(files):
        assert time.monotonic() < deadline, f"still there: {processes_of(files)}"
        time.sleep(0.2)
    assert Path(files) in sweep()
    assert not Path(files).exists()
