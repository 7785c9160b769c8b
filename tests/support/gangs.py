"""Gangs for tests: the same requests on one rank, on ranks that are threads, and on gloo processes.

Imported by the tests; as a script one rank on its own GPU over NCCL, or with rank -1 all requests on one:
gangs.py RANK PORT OUT_FILE GRID NUMERICS OPTIONS        GRID e.g. 2,1,2,0; OPTIONS of the engine as JSON
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.load import from_options
from deepinfer_ray.engine.build import build_engine, build_rank
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.parallel.grid import RankGrid
from deepinfer_ray.parallel.groups import ProcessGroups, Store
from deepinfer_ray.parallel.rank_group import RankGroup, SingleRank, ThreadGroup
from deepinfer_ray.parallel.rendezvous import Rendezvous

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
BASE = {
    "max_model_len": 256,
    "scheduler": {"max_seqs": 4, "max_batched_tokens": 256},
    "cache.cpu_budget_bytes": 64 << 20,
    "observability": {"log_interval": 0},
}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """A grid, options of the engine on top of `BASE`, requests, and how many turns pass before each."""

    grid: tuple[int, int, int, int]
    model: str = "tinyB"
    numerics: str = "released"
    options: dict[str, Any] = field(default_factory=dict)
    count: int = 8
    max_tokens: int = 8
    longest: int = 60
    seed: int = 0
    skip: int = 0
    """Engines that get no request at all: the first ones."""

    def config(self) -> EngineConfig:
        dp, cp, ep, engram = self.grid
        sizes = {"dp": dp, "cp": cp, "ep": ep, "parallel": {"engram": engram, "timeout_s": TIMEOUT_S}}
        return from_options(EngineConfig, {**BASE, **sizes, "numerics": self.numerics, **self.options})

    def single(self) -> EngineConfig:
        """The same engine on one rank."""
        options = {key: value for key, value in self.options.items() if not key.startswith("eplb")}
        return from_options(EngineConfig, {**BASE, "numerics": self.numerics, **options})

    @property
    def rank_grid(self) -> RankGrid:
        dp, cp, ep, engram = self.grid
        return RankGrid.build(dp=dp, cp=cp, ep=ep, engram=engram).gang_grid()

    def requests(self) -> list[Request]:
        random = np.random.default_rng(self.seed)
        made = []
        for index in range(self.count):
            prompt = random.integers(3, 500, int(random.integers(1, self.longest + 1))).astype(np.int32)
            params = SamplingParams(
                temperature=0.0 if index % 2 == 0 else 1.0,
                max_tokens=int(random.integers(1, self.max_tokens + 1)),
                logprobs=3,
                prompt_logprobs=0 if index % 3 == 0 and not self.truncates else None,
                ignore_eos=True,
            )
            made.append(Request(prompt, params, seed=index, request_id=index))
        return made

    @property
    def truncates(self) -> bool:
        return "prefill" in self.options

    def share(self, engine: int, engines: int) -> list[Request]:
        """Requests of one engine: dealt round, but the first `skip` engines get none."""
        if engine < self.skip:
            return []
        return self.requests()[engine - self.skip :: engines - self.skip]


Answer = dict[str, Any]


def answer(result: Any) -> Answer:
    """Everything of a result that must not depend on ranks, as exact JSON-able numbers."""
    return {
        "tokens": result.token_ids.tolist(),
        "logprobs": np.asarray(result.logprobs).view(np.uint32).tolist(),
        "prompt": None if result.prompt_logprobs is None else result.prompt_logprobs.view(np.uint32).tolist(),
        "top": [[[token, float(value).hex()] for token, value in row] for row in result.top_logprobs or []],
        "finish": str(result.finish_reason),
    }


def run_engine(engine: Any, requests: list[Request]) -> dict[str, Answer]:
    """Two waves, so that engines are idle in between and start at different times."""
    answers: dict[str, Answer] = {}
    half = (len(requests) + 1) // 2
    for wave in (requests[:half], requests[half:]):
        for request in wave:
            engine.add(request)
        if isinstance(engine, Engine):
            for result in engine.run():
                answers[str(result.request_id)] = answer(result)
            engine.check_integrity()
        else:
            engine.step()
            while not engine.ranks.idle:
                engine.step()
    return answers


def alone(case: Case, device: str = "cpu") -> dict[str, Answer]:
    """All requests on one rank without any group."""
    engine = build_engine(GOLDEN / case.model, case.single(), device)
    answers: dict[str, Answer] = {}
    for request in case.requests():
        engine.add(request)
    for result in engine.run():
        answers[str(result.request_id)] = answer(result)
    engine.close()
    return answers


def work(case: Case, groups: ProcessGroups, rank: int, device: str = "cpu") -> dict[str, Any]:
    """One rank of a gang: its answers and what else a test may want to see."""
    engine = build_rank(GOLDEN / case.model, case.config(), device, groups, rank=rank)
    place, grid = groups.place, groups.grid
    requests = case.share(place.engine, grid.num_engines) if place.is_driver else []
    answers = run_engine(engine, requests)
    rebalancer = None
    if engine.ranks is None:  # a gang of one
        groups.close()
    else:
        rebalancer = engine.ranks.rebalancer
        engine.ranks.leaving = True
        while not engine.ranks.left:
            engine.step()
    engine.close()
    return {
        "answers": answers,
        "blocks": engine.pools.num_blocks,
        "rebalances": rebalancer.rebalances if rebalancer is not None else 0,
        "balance": engine.pulse().get("expert_load_balance") if isinstance(engine, Engine) else None,
        "steps": engine.loop.num_steps if isinstance(engine, Engine) else engine.num_steps,
    }


def thread_groups(grid: RankGrid) -> list[ProcessGroups]:
    """The groups of a gang whose ranks are threads of this process."""

    def split(lists: list[list[int]]) -> dict[int, RankGroup]:
        made: dict[int, RankGroup] = {}
        for members in lists:
            own: list[RankGroup] = (
                [SingleRank()] if len(members) == 1 else list(ThreadGroup.of(len(members), TIMEOUT_S))
            )
            made.update(zip(members, own, strict=True))
        return made

    world = list(range(grid.world_size))
    gang, cp, ep, engram = (
        split([world]), split(grid.groups("cp")), split(grid.groups("ep")), split(grid.groups("engram"))
    )  # fmt: skip
    votes = split([world[:: grid.cp]])
    return [
        ProcessGroups(
            grid, r, cp=cp[r], ep=ep[r], engram=engram[r], gang=gang[r], votes=votes.get(r, SingleRank())
        )
        for r in world
    ]


def on_threads(case: Case, body: Callable[..., Any] = work) -> list[Any]:
    """`body` on every rank, a thread each; results in rank order, or the first error."""
    groups = thread_groups(case.rank_grid)
    results: list[Any] = [None] * len(groups)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(case, groups[rank], rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5 * TIMEOUT_S)
    if errors:
        raise errors[0]
    return results


def _process(rank: int, cases: list[Case], ports: list[Any], out: Any) -> None:
    torch.set_num_threads(1)
    for number, case in enumerate(cases):
        grid = case.rank_grid
        if rank >= grid.world_size:
            continue
        groups = ProcessGroups.connect(grid, rank, ports[number], timeout_s=TIMEOUT_S)
        Path(f"{out}.{number}.{rank}").write_text(json.dumps(work(case, groups, rank)))


def on_processes(cases: list[Case], out: Path) -> list[list[Any]]:
    """All cases on one set of gloo processes, one after the other; results by case and rank."""
    stores = [Store("127.0.0.1", f"case{number}") for number in range(len(cases))]
    size = max(case.rank_grid.world_size for case in cases)
    context = multiprocessing.get_context("fork")
    meet = [store.rendezvous for store in stores]
    processes = [context.Process(target=_process, args=(rank, cases, meet, out)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(10 * TIMEOUT_S)
        assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    return [
        [json.loads(Path(f"{out}.{n}.{rank}").read_text()) for rank in range(case.rank_grid.world_size)]
        for n, case in enumerate(cases)
    ]


def merged(results: list[Any]) -> dict[str, Answer]:
    """All answers of a gang."""
    return {key: value for result in results for key, value in result["answers"].items()}


def main(rank: int, port: int, out: Path, grid: str, numerics: str, options: str) -> None:
    """One rank on CUDA; see the module docstring."""
    dp, cp, ep, engram = (int(size) for size in grid.split(","))
    case = Case((dp, cp, ep, engram), numerics=numerics, options=json.loads(options), max_tokens=16, seed=11)
    device = f"cuda:{max(rank, 0)}"
    torch.cuda.set_device(device)
    if rank < 0:
        out.write_text(json.dumps({"answers": alone(case, device)}))
        return
    meet = Rendezvous("127.0.0.1", port, "cuda")
    groups = ProcessGroups.connect(case.rank_grid, rank, meet, timeout_s=TIMEOUT_S, device=device)
    out.write_text(json.dumps(work(case, groups, rank, device)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
