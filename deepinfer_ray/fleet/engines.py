"""What a rank's loop needs from an engine, and the default way to build one from a checkpoint.

Knows: the protocol and the import path of the real engine. Does not know: Ray, queues, rows.
The model is imported inside the factory, so that neither the driver nor a stub engine pays for torch.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.fleet.messages import RankSpec


class EngineLike(Protocol):
    """One rank's engine. One thread calls it; every added request ends in exactly one result of `step`."""

    def add(self, request: Request) -> Any:
        """Queue a request; `RowError` if this request can never run."""
        ...

    def step(self) -> list[RequestResult]:
        """One engine step; results of the requests that ended."""
        ...

    def has_unfinished(self) -> bool:
        """Whether another step is needed."""
        ...

    def wanted(self) -> int:
        """How many more requests it would take now; 0 when saturated."""
        ...


EngineFactory = Callable[[RankSpec], EngineLike]

DEFAULT_FACTORY = "deepinfer_ray.fleet.engines:engine_from_checkpoint"


def resolve_factory(factory: EngineFactory | str) -> EngineFactory:
    """The factory itself, or the attribute that `module:attribute` names; `ConfigError` if there is none."""
    if callable(factory):
        return factory
    module_name, _, attribute = factory.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine factory {factory!r} cannot be imported ({error}); write it as module:attribute"
        ) from None
    if not callable(found):
        raise ConfigError(f"engine factory {factory!r} is a {type(found).__name__}, not a function")
    checked: EngineFactory = found
    return checked


def engine_from_checkpoint(spec: RankSpec) -> EngineLike:
    """The real engine of one rank, weights loaded; with a rendezvous collective over its gang.

    `ConfigError`, `CheckpointError`, `RankFailure`.
    """
    import torch

    from deepinfer_ray.config.engine import EngineConfig
    from deepinfer_ray.engine.build import build_engine, build_rank, pick_device
    from deepinfer_ray.engine.engine import Engine
    from deepinfer_ray.parallel.groups import ProcessGroups

    torch.set_num_threads(spec.num_threads)
    log_to_stderr(getattr(getattr(spec.engine_config, "observability", None), "log_level", "info"))
    if spec.rendezvous is None or spec.grid is None:
        engine = build_engine(spec.model_dir, spec.engine_config, spec.device, rank=spec.rank)
        engine.gc.own_process()
        return engine
    options = (spec.engine_config or EngineConfig()).parallel
    groups = ProcessGroups.connect(
        spec.grid,
        spec.place,
        spec.rendezvous,
        timeout_s=options.timeout_s,
        device=pick_device(spec.device),
        nccl_ctas=options.nccl_ctas,
    )
    try:
        member = build_rank(spec.model_dir, spec.engine_config, spec.device, groups, rank=spec.rank)
    except BaseException:
        groups.abort()  # the others learn it now, not after their time-out
        raise
    if isinstance(member, Engine):
        member.gc.own_process()
    return member


def log_to_stderr(level: str) -> None:
    """This process's log lines go to stderr, which Ray keeps in a file for each worker.

    level: `observability.log_level`.
    """
    project = logging.getLogger("deepinfer_ray")
    project.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper().replace("WARN", "WARNING"))
    if not project.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        project.addHandler(handler)
        project.propagate = False
