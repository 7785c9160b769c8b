"""`BatchPredictor`: the callable class of a `map_batches`; tables of prompts in, with completions out.

Knows: the rows of one batch and their columns, one engine in this process. Does not know: Ray, other batches.

A batch may run twice: Ray Data repeats one whose actor died and goes on after the blocks it has already. So
what a batch gives depends on its rows alone: seeds come from row ids, and pieces are fixed row ranges in
input order, whatever finished first. Ray Data cuts blocks by bytes: where a repetition may give other bytes
(a device whose sums depend on the batch), a task should end as one block, as those of `build_processor` do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from deepinfer_ray.data.config import ProcessorConfig
from deepinfer_ray.data.shared_engine import SharedEngine
from deepinfer_ray.engine.request import Request
from deepinfer_ray.errors import InputError
from deepinfer_ray.fleet.engines import DEFAULT_FACTORY, EngineFactory, resolve_factory
from deepinfer_ray.fleet.messages import RankSpec
from deepinfer_ray.job import values
from deepinfer_ray.job.columns import Columns, no_column
from deepinfer_ray.job.ids import id_strings
from deepinfer_ray.job.prepare import prepare_rows
from deepinfer_ray.job.schema import check_names
from deepinfer_ray.job.sink import PartWriter, RowOutcome

logger = logging.getLogger(__name__)

ROW_HASH = "row_hash"
"""Column that `read_parquet(include_row_hash=True)` adds: a hash of a row's file and position."""


class BatchPredictor:
    """Loads the model when it is made. Use it with `batch_format="pyarrow"`:

        ds.map_batches(
            BatchPredictor,
            fn_constructor_kwargs={"config": config},  # or the options: {"model": …, "max_tokens": …}
            compute=ray.data.ActorPoolStrategy(size=4),
            batch_format="pyarrow",
            batch_size=128,
        )

    A call gives the batch's rows in input order, in pieces; it may be called from several threads at a time,
    whose rows then run side by side. What is wrong with a row stands in its columns `error` and `error_code`.
    """

    def __init__(
        self,
        config: ProcessorConfig | Mapping[str, Any] | None = None,
        *,
        engine_factory: EngineFactory | str = DEFAULT_FACTORY,
        **options: Any,
    ) -> None:
        """config: a `ProcessorConfig` or its options; or give the options by name.

        Raises `ConfigError` and `CheckpointError`.
        """
        if config is None or isinstance(config, Mapping):
            config = ProcessorConfig(**{**(config or {}), **options})
        elif options:
            raise TypeError(f"give a ProcessorConfig or options, not both: {', '.join(sorted(options))}")
        self.config = config
        setup = prepare_rows(config.run_config, logger.info)
        self._columns = setup.columns
        ids_given = dataclasses.replace(setup.columns, id=None)  # see `row_ids`
        self._encoder = dataclasses.replace(setup, columns=ids_given).encoder()
        self._prefix = config.output_prefix or ""
        self._writer = PartWriter(setup.rules.n, self._prefix, {}, setup.reader())
        spec = RankSpec(
            rank=0,
            world_size=1,
            gang=0,
            generation=0,
            model_dir=config.model,
            engine_config=config.run_config.engine,
            device=config.run_config.runtime.backend,
            num_threads=max(1, int(config.num_cpus)),
            engine_factory=engine_factory,
        )
        self._engine = SharedEngine(resolve_factory(engine_factory)(spec))
        self._end = weakref.finalize(
            self, self._engine.close
        )  # a thread inside torch must not outlive Python

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """batch: an Arrow table with the configured columns. Yields the same rows with the output columns.

        Raises `InputError` for a table without those columns and `RankFailure` when the engine breaks.
        """
        table = self._checked(batch)
        outcomes, requests, owners = self._encode(table)
        ticket = self._engine.submit(requests)
        try:
            for start in range(0, max(1, table.num_rows), self.config.piece_rows):
                piece = outcomes[start : start + self.config.piece_rows]
                while not all(outcome.complete for outcome in piece):
                    result = ticket.take()
                    row, index = owners[result.request_id]
                    outcomes[row].set(index, result, 1)
                yield self._writer.table(table.slice(start, len(piece)), piece)[0]
        finally:
            ticket.cancel()

    def _checked(self, batch: pa.Table) -> pa.Table:
        if not isinstance(batch, pa.Table):
            raise InputError(
                f"a batch is a {type(batch).__name__}, not an Arrow table; give batch_format='pyarrow' to "
                "map_batches, which keeps types, nulls and nested columns"
            )
        check_names(batch.column_names, self._prefix, "the data set")
        for name in _named(self._columns):
            if name not in batch.column_names:
                raise InputError(f"the data set {no_column(name, batch.column_names)}")
        return batch

    def _encode(self, table: pa.Table) -> tuple[list[RowOutcome], list[Request], dict[int, tuple[int, int]]]:
        """Outcomes in row order; requests; request id → (row, completion index)."""
        outcomes: list[RowOutcome] = []
        requests: list[Request] = []
        owners: dict[int, tuple[int, int]] = {}
        names = _RowNames(row_ids(table, self._columns))
        for number, row in enumerate(self._encoder.encode(names, table)):
            if row.prompt is not None and row.params is not None:
                for index, seed in enumerate(row.seeds):
                    requests.append(Request(row.prompt, row.params, seed))
                    owners[requests[-1].request_id] = (number, index)
            outcomes.append(RowOutcome(row))
        return outcomes, requests, owners

    def close(self) -> None:
        """End the engine's thread; a later call fails. May be called twice."""
        self._end()


@dataclasses.dataclass(frozen=True)
class _RowNames:
    """Ids of the rows of one batch, by row number."""

    ids: list[str]

    def row_name(self, row: int) -> str:
        return self.ids[row]


def row_ids(table: pa.Table, columns: Columns) -> list[str]:
    """The id of every row: the same for the same row in whatever batch it comes.

    The id column if one is named; else `row_hash` where the reader added it; else, and for a null id, 128
    bits of a hash over all that the row asks for: equal rows then have equal ids and equal completions.
    """
    given: list[str | None] = [None] * table.num_rows
    if columns.id is not None:
        given = id_strings(table[columns.id])
    elif ROW_HASH in table.column_names:
        given = id_strings(table[ROW_HASH])
    asked = sorted(set(_named(columns)) - {columns.id})
    getters = [values.getter(table[name]) for name in asked] if None in given else []
    return [_content_id(getters, row) if value is None else value for row, value in enumerate(given)]


def _content_id(getters: list[values.Getter], row: int) -> str:
    digest = hashlib.sha256()
    for get in getters:
        raw = get(row)
        data = raw if isinstance(raw, bytes) else repr(_plain(raw)).encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"sha256:{digest.hexdigest()[:32]}"


def _plain(raw: Any) -> Any:
    try:
        return raw.to_pylist() if isinstance(raw, pa.Array) else raw.as_py() if raw is not None else None
    except UnicodeDecodeError:
        return str(raw)


def _named(columns: Columns) -> list[str]:
    """Every column that the configuration names."""
    return [name for name in dataclasses.asdict(columns).values() if isinstance(name, str)]
