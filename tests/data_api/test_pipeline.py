"""Real Ray Data pipelines: the job's rows, actors that die, long work; one cluster for all of them."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.data import BatchPredictor, ProcessorConfig, build_processor
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.ray

NESTED = pa.struct([("tags", pa.list_(pa.string())), ("depth", pa.int8())])


@pytest.fixture
def prompts(tmp_path):
    """A directory of two files: texts, ids, a bad row, a nested column. Returns (directory, table)."""
    texts = [None if i == 4 else f"row {i} ⚓" for i in range(20)]
    nested = pa.array([{"tags": [f"t{i}"], "depth": i} if i % 3 else None for i in range(20)], NESTED)
    table = pa.table({"name": [f"n{i:02}" for i in range(20)], "prompt": texts, "nested": nested})
    (tmp_path / "in").mkdir()
    for part in range(2):
        pq.write_table(table.slice(part * 10, 10), tmp_path / f"in/{part}.parquet", row_group_size=4)
    return tmp_path / "in", table


def test_read_map_write_gives_the_rows_of_the_job(ray_cluster, model, prompts, tmp_path, job_rows, by_row_id):
    directory, table = prompts
    config = ProcessorConfig(
        model=model, id_column="name", max_tokens=5, seed=7, device="cpu", max_num_seqs=8, num_cpus=1
    )
    dataset = (
        ray_cluster.data.read_parquet(str(directory))
        .repartition(4)
        .map_batches(
            BatchPredictor,
            fn_constructor_kwargs={"config": config},
            compute=ray_cluster.data.ActorPoolStrategy(size=2),
            batch_format="pyarrow",
            batch_size=6,
            num_cpus=1,
        )
    )
    dataset.write_parquet(str(tmp_path / "out"))
    written = ds.dataset(tmp_path / "out").to_table()
    engine = build_engine(model, config.run_config.engine, "cpu")
    expected = job_rows(directory, engine, id_column="name", max_tokens=5, seed=7, device="cpu")
    assert by_row_id(written) == expected
    assert written.schema.field("nested").type == NESTED
    assert written.num_rows == table.num_rows


@pytest.fixture
def processed(ray_cluster, model, stub, tmp_path):
    """processed(ids, engine={…}, context={…}, options…) → the table that a processor with the stub gives."""

    def run(ids, engine=(), context=None, preprocess=None, postprocess=None, **options):
        config = ProcessorConfig(model=model, token_ids_column="ids", id_column="n", device="cpu", **options)
        factory = partial(stub.make, directory=str(tmp_path), **dict(engine))
        processor = build_processor(config, preprocess, postprocess, engine_factory=factory)
        table = pa.table({"n": pa.array(range(len(ids))), "ids": pa.array(ids, pa.list_(pa.int32()))})
        dataset = ray_cluster.data.from_arrow(table)
        for name, value in (context or {}).items():
            setattr(dataset.context, name, value)
        return pa.concat_tables(processor(dataset).iter_batches(batch_size=None, batch_format="pyarrow"))

    return run


def test_an_actor_killed_mid_batch_doubles_and_loses_nothing(processed, by_row_id, job_rows, stub, tmp_path):
    """Blocks of the batch were out already when its actor died; the repetition goes on behind them.

    With pieces in another order the second time, rows 0 to 5 came twice and 18 to 23 not at all.
    """
    ids = [[3 + i, 1, 4] for i in range(24)]
    ids[19] = [9, 201]  # kills its engine's process the first time
    options = {"batch_size": 24, "piece_rows": 2, "context": {"target_max_block_size": 64}}
    out = processed(ids, engine={"room": 1, "step_s": 0.05}, **options)  # one after the other
    assert (tmp_path / "killed").exists()
    rows = by_row_id(out)
    assert sorted(rows, key=int) == [str(i) for i in range(24)]
    assert {row["error_code"] for row in rows.values()} == {None}
    assert rows == by_row_id(processed(ids, **options))
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": pa.array(range(24)), "ids": pa.array(ids, pa.list_(pa.int32()))}), path)
    engine = stub.StubEngine(str(tmp_path), room=3)
    assert rows == job_rows(path, engine, token_ids_column="ids", id_column="n", device="cpu")


def test_no_progress_guard_does_not_fire_on_work(processed):
    """One input block of 5 s of work, a guard of 3 s: batches end in between, whatever the block's size."""
    guard = {"execution_no_progress_timeout_s": 3.0}
    ids = [[i + 1] for i in range(40)]
    out = processed(
        ids, engine={"room": 1, "step_s": 0.12}, context=guard, batch_size=5, no_progress_timeout_s=3.0
    )
    assert out.num_rows == 40


def test_preprocess_and_postprocess(processed):
    out = processed(
        [[1, 2]],
        preprocess=lambda row: {"n": row["n"], "ids": [*row["ids"], 3]},
        postprocess=lambda row: {"tokens": row["prompt_tokens"]},
        concurrency=(1, 2),
    )
    assert out.to_pydict() == {"tokens": [3]}


def test_a_model_that_is_no_model_is_refused_before_any_actor(ray_cluster, tmp_path, stub):
    dataset = ray_cluster.data.range(1)
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.json"):
        build_processor(ProcessorConfig(model=str(tmp_path)))(dataset)


def test_the_guard_is_raised_never_lowered(ray_cluster, model):
    for before, asked, after in ((1800, 7200, 7200), (9000, 7200, 9000), (1800, -1, -1), (-1, 7200, -1)):
        dataset = ray_cluster.data.range(1)
        dataset.context.execution_no_progress_timeout_s = before
        config = ProcessorConfig(model=model, device="cpu", no_progress_timeout_s=asked)
        assert build_processor(config)(dataset).context.execution_no_progress_timeout_s == after
