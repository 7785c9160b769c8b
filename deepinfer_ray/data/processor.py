"""`build_processor`: a function from data set to data set, on an actor pool of Ray Data.

Knows: Ray Data's operators and limits. Does not know: engines, columns. Imports Ray when a processor runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_ray.data.config import ProcessorConfig
from deepinfer_ray.data.predictor import BatchPredictor
from deepinfer_ray.fleet.engines import DEFAULT_FACTORY, EngineFactory
from deepinfer_ray.job.prepare import prepare_rows

if TYPE_CHECKING:
    from ray.data import Dataset

Row = dict[str, Any]
CALLS_PER_ACTOR = 2
"""Batches that share an engine: while the last rows of one run, those of the next fill the free seats."""


class Processor:
    """Adds completions to a data set, lazily. preprocess, postprocess: functions of one row (a dict)."""

    def __init__(
        self,
        config: ProcessorConfig,
        preprocess: Callable[[Row], Row] | None = None,
        postprocess: Callable[[Row], Row] | None = None,
        *,
        engine_factory: EngineFactory | str = DEFAULT_FACTORY,
    ) -> None:
        self.config = config
        self.preprocess = preprocess
        self.postprocess = postprocess
        self._engine_factory = engine_factory

    def __call__(self, dataset: Dataset) -> Dataset:
        """The data set with the output columns. Rows keep their types; their order is Ray Data's.

        Raises `ConfigError` and `CheckpointError` when the model can be looked at from here.
        """
        from ray.data import ActorPoolStrategy

        config = self.config
        if Path(config.model).is_dir():
            prepare_rows(config.run_config, lambda text: None)
        if self.preprocess is not None:
            dataset = dataset.map(self.preprocess)
        # without this a block of 100,000 rows would be one task: no progress to see, all redone by a retry
        dataset = dataset.repartition(target_num_rows_per_block=config.batch_size)
        least, most = config.pool
        num_gpus = self._num_gpus()
        if num_gpus == 0 and config.run_config.runtime.backend == "auto":
            # an actor without a GPU still sees those of its machine
            config = config.model_copy(update={"engine": {**config.engine, "runtime.backend": "cpu"}})
        options: dict[str, Any] = {
            name: value
            for name in ("resources", "accelerator_type", "label_selector", "runtime_env")
            if (value := getattr(config, name)) is not None
        }
        dataset = dataset.map_batches(
            BatchPredictor,
            fn_constructor_kwargs={"config": config, "engine_factory": self._engine_factory},
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=most,
                max_tasks_in_flight_per_actor=CALLS_PER_ACTOR + 1,
                max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
                enable_true_multi_threading=True,
            ),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            num_cpus=config.num_cpus,
            num_gpus=num_gpus,
            udf_modifying_row_count=False,
            **options,
        )
        limit = dataset.context.execution_no_progress_timeout_s
        if limit > 0:
            asked = config.no_progress_timeout_s
            dataset.context.execution_no_progress_timeout_s = -1 if asked < 0 else max(limit, asked)
        return dataset if self.postprocess is None else dataset.map(self.postprocess)

    def _num_gpus(self) -> float:
        import ray

        if self.config.num_gpus is not None:
            return self.config.num_gpus
        backend = self.config.run_config.runtime.backend
        if backend == "auto":
            if not ray.is_initialized():
                ray.init()
            return float(ray.cluster_resources().get("GPU", 0) > 0)
        return float(backend == "cuda")


def build_processor(
    config: ProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
    *,
    engine_factory: EngineFactory | str = DEFAULT_FACTORY,
) -> Processor:
    """A `Processor`; call it with a data set.

    preprocess: makes the configured columns of a row, e.g. the prompt. postprocess: works on a row with the
    output columns. Both are plain functions of a dict, run as tasks of Ray Data.
    """
    return Processor(config, preprocess, postprocess, engine_factory=engine_factory)
