"""Batches in one process: the job's rows, fixed pieces, surviving types, shared engines, refusals."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import threading
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.data import BatchPredictor, ProcessorConfig
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.errors import ConfigError, InputError, RankFailure
from deepinfer_ray.job.schema import output_schema


def ids_table(*prompts, **columns):
    return pa.table({"ids": pa.array(list(prompts), pa.list_(pa.int64())), **columns})


def run(predictor, table, batch=None):
    """All pieces of all batches as one table."""
    step = batch or max(1, table.num_rows)
    batches = [table.slice(start, step) for start in range(0, max(1, table.num_rows), step)]
    return pa.concat_tables(piece for one in batches for piece in predictor(one))


@pytest.mark.parametrize("batch", [24, 7])
def test_batches_give_the_rows_of_the_job(model, tmp_path, job_rows, by_row_id, batch):
    texts = [None if i % 8 == 3 else "" if i % 8 == 5 else f"row {i} ⚓" for i in range(24)]
    own = [json.dumps({"temperature": i % 3 / 2, "top_p": 2 if i == 6 else 0.9}) for i in range(24)]
    table = pa.table({"name": range(100, 124), "text": texts, "own": own})
    pq.write_table(table, tmp_path / "in.parquet")
    columns = {"prompt_column": "text", "id_column": "name", "sampling_column": "own"}
    predictor = BatchPredictor(
        model=model, **columns, max_tokens=6, seed=3, device="cpu", max_num_seqs=8, piece_rows=5
    )
    rows = by_row_id(run(predictor, table, batch))
    engine = build_engine(model, predictor.config.run_config.engine, "cpu")
    expected = job_rows(tmp_path / "in.parquet", engine, max_tokens=6, seed=3, device="cpu", **columns)
    assert rows == expected
    codes = {row["error_code"] for row in rows.values()}
    assert codes == {None, "null_prompt", "empty_prompt", "bad_sampling_params"}
    predictor.close()


def test_pieces_are_fixed_row_ranges_in_input_order_and_the_same_twice(predictor):
    one = predictor(piece_rows=4, max_tokens=3, engine={"room": 3})
    table = ids_table(*([i + 5, 1, 2] for i in range(10)), n=pa.array(range(10)))
    first, second = list(one(table)), list(one(table))
    assert [piece["n"].to_pylist() for piece in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(a.equals(b) for a, b in zip(first, second, strict=True))
    assert [len(ids) for ids in first[0]["token_ids"].to_pylist()] == [3] * 4


def test_no_piece_waits_for_a_later_one(predictor):
    """The last row never ends; the pieces before it come all the same."""
    one = predictor(piece_rows=2)
    pieces = one(ids_table([1], [2], [3], [4], [5, 203, 240]))
    assert [next(pieces).num_rows, next(pieces).num_rows] == [2, 2]
    pieces.close()


def test_types_and_nested_columns_survive(predictor):
    nested = pa.struct([("a", pa.list_(pa.int8())), ("b", pa.map_(pa.string(), pa.float32()))])
    columns = {
        "words": pa.array(["x", "y", None]).dictionary_encode(),
        "deep": pa.array([{"a": [1], "b": [("k", 0.5)]}, None, {"a": [], "b": []}], nested),
        "when": pa.array([datetime.datetime(2026, 1, 1)] * 3, pa.timestamp("us", "UTC")),
        "price": pa.array([decimal.Decimal("1.25")] * 3, pa.decimal128(12, 2)),
        "long": pa.array(["a", None, "b"], pa.large_string()),
        "image": pa.array([b"\xff", b"", None], pa.large_binary()),
        "fixed": pa.array([[1, 2]] * 3, pa.list_(pa.uint16(), 2)),
    }
    table = ids_table([1], None, [3], **columns)
    out = run(predictor(piece_rows=2), table)
    assert out.schema.equals(output_schema(table.schema, 1))
    assert out.select(table.column_names).equals(table)
    assert out["error_code"].to_pylist() == [None, "null_prompt", None]
    empty = run(predictor(), table.slice(0, 0))
    assert (empty.num_rows, empty.schema) == (0, out.schema)


def test_several_completions_a_row_and_a_prefix(predictor):
    out = run(predictor(n=2, output_prefix="out_"), ids_table([4, 5], [6, 7]))
    assert [len(set(texts)) for texts in out["out_completion"].to_pylist()] == [2, 2]
    assert out.schema.equals(output_schema(out.select(["ids"]).schema, 2, "out_"))


def test_an_id_depends_on_the_row_alone(predictor):
    table = ids_table([1, 2], [3], [1, 2], own=["{}", None, "{}"], other=[1, 2, 3])
    ids = run(predictor(sampling_column="own"), table)["row_id"].to_pylist()
    assert ids[0] == ids[2] != ids[1]
    assert all(name.startswith("sha256:") and len(name) == 39 for name in ids)
    assert run(predictor(sampling_column="own"), table, batch=1)["row_id"].to_pylist() == ids
    hashed = table.append_column("row_hash", pa.array([7, 8, 9], pa.uint64()))
    assert run(predictor(), hashed)["row_id"].to_pylist() == ["7", "8", "9"]
    partly = hashed.set_column(2, "other", pa.array(["a", None, "b"]))
    named = run(predictor(id_column="other"), partly)["row_id"].to_pylist()
    assert (named[0], named[1][:7], named[2]) == ("a", "sha256:", "b")


def test_batches_share_the_engine(model, stub):
    """While one slow row of the first batch runs, the rows of a second fill the free seats."""
    engine = stub.StubEngine(room=8, step_s=0.002)
    predictor = BatchPredictor(
        model=model, token_ids_column="ids", device="cpu", engine_factory=lambda spec: engine
    )
    ended = []

    def consume(name, table):
        ended.append((name, run(predictor, table).num_rows))

    slow = threading.Thread(target=consume, args=("slow", ids_table([1], [1, 203, 250], [2])))
    slow.start()
    while engine.steps < 5:
        pass
    consume("quick", ids_table(*([i + 1] for i in range(20))))
    slow.join(30)
    assert ended == [("quick", 20), ("slow", 3)]
    assert engine.most == 8
    predictor.close()


def test_a_batch_that_nobody_takes_gives_way(model, stub):
    engine = stub.StubEngine(room=1)
    predictor = BatchPredictor(
        model=model, token_ids_column="ids", device="cpu", piece_rows=1, engine_factory=lambda spec: engine
    )
    abandoned = predictor(ids_table([1], *([2, 203, 500] for _ in range(50))))
    assert next(abandoned).num_rows == 1
    abandoned.close()
    assert run(predictor, ids_table([5])).num_rows == 1
    assert engine.steps < 50 * 500 / 2  # it waited for the slow rows that ran, not for all
    predictor.close()


def test_a_row_that_the_engine_cannot_take_is_an_error_of_its_own(model, stub):
    class Picky(stub.StubEngine):
        def add(self, request):
            if request.prompt[0] == 66:
                raise ArithmeticError("no such row")
            super().add(request)

    predictor = BatchPredictor(
        model=model, token_ids_column="ids", device="cpu", engine_factory=lambda spec: Picky()
    )
    rows = run(predictor, ids_table([65], [66], [67])).to_pylist()
    assert [row["error_code"] for row in rows] == [None, "internal", None]
    assert rows[1]["error"] == "ArithmeticError: no such row"
    predictor.close()


def test_a_broken_engine_fails_every_batch(predictor):
    one = predictor()
    for prompt in ([1, 202], [3]):
        with pytest.raises(RankFailure, match="engine of this actor failed: FloatingPointError: the stub"):
            list(one(ids_table(prompt)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": np.arange(3)}, "a batch is a dict, not an Arrow table; give batch_format='pyarrow'"),
        (pa.table({"prompt": ["a"]}), "the data set has no column ids; its columns are: prompt"),
        (ids_table([1], error=["x"]), "the data set has the column error, which the output also has"),
    ],
)
def test_a_table_that_cannot_be_used(predictor, batch, message):
    with pytest.raises(InputError, match="^" + message):
        next(iter(predictor()(batch)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 3}, "unknown option 'max_token'; did you mean"),
        ({"promt_column": "a"}, "unknown option 'promt_column'; did you mean 'prompt_column'"),
        ({"dp": 2}, "an actor runs one rank, not dp = 2, cp = 1, ep = 1; for more ranks set concurrency"),
        ({"concurrency": (3, 2)}, "concurrency = \\(3, 2\\) must be a number of actors from 1, or a pair"),
        (
            {"max_tokens": 3, "sampling": {"max_tokens": 4}},
            "max_tokens is given twice: by itself and in sampl",
        ),
        ({"temperature": -1}, "temperature = -1: must be greater than or equal to 0"),
        ({"token_ids_column": "a", "prompt_column": "b"}, "give only one of prompt_column, messages_column"),
        ({"batch_size": 0}, "batch_size = 0: must be greater than or equal to 1"),
        ({"scheduler": {"max_seq": 1}}, "unknown key 'scheduler.max_seq'"),
    ],
)
def test_options_are_checked_before_anything_loads(options, message):
    with pytest.raises(ConfigError, match=message):
        ProcessorConfig(model="m", **options)


def test_options_land_in_their_blocks():
    config = ProcessorConfig(
        model="m",
        max_tokens=7,
        thinking=False,
        max_num_seqs=4,
        engine={"numerics": "exact"},
        concurrency=(1, 3),
    )
    run_config = config.run_config
    assert (run_config.job.sampling.max_tokens, run_config.job.chat.thinking) == (7, False)
    assert (run_config.scheduler.max_seqs, run_config.numerics, run_config.model.path) == (4, "exact", "m")
    assert config.pool == (1, 3)
    with pytest.raises(TypeError, match="give a ProcessorConfig or options, not both: seed"):
        BatchPredictor(config, seed=1)


def test_missing_model_is_refused(tmp_path, stub):
    with pytest.raises(ConfigError, match=r"config\.json"):
        BatchPredictor(model=str(tmp_path), engine_factory=partial(stub.make))


def test_chat_rows_are_parsed(model, stub):
    """Messages go in, the completion columns of chats come out."""
    predictor = BatchPredictor(
        model=model, messages_column="chat", thinking=False, device="cpu", engine_factory=stub.make
    )
    chats = [[{"role": "user", "content": "hello"}], None]
    out = run(predictor, pa.table({"chat": chats}))
    assert out["finish_reason"].to_pylist() == ["length", "error"]
    assert out["completion"][0].as_py() is not None
    assert list(itertools.compress(out["error_code"].to_pylist(), [0, 1])) == ["null_prompt"]
    predictor.close()
