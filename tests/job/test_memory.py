"""The driver's memory does not grow with the number of rows; measured in a process that does nothing else."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, IDS_PER_ROW = 20_000, 1_000
MIB = 1 << 20


@pytest.fixture
def memory(driver, tmp_path):
    """memory(rows, rows before it has settled, stub options, flags…): nothing stays of the rows in between.

    Buffers of the part of a file that is being read come and go, which is why the end counts where they are
    gone: what is held for good is there then too.
    """

    def run(rows, settled, stub, **options):
        file = tmp_path / "memory"
        process = driver({**stub, "memory": [str(file), rows // 200]}, **options)
        out, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, errors
        assert json.loads(out.splitlines()[-1])["ok"] == rows
        samples = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
        assert len(samples) > 50
        before = max(rss for row, rss in samples if row < settled)
        most = max(rss for row, rss in samples if row >= settled)
        end = min(rss for row, rss in samples if row >= 0.85 * rows)
        values = (before, most, end)
        figures = "settled {:.0f} MiB, later at most {:.0f} MiB, {:.0f} MiB in the end".format(
            *(value / MIB for value in values)
        )
        print(figures)
        assert end - before < 16 * MIB, figures
        assert most - before < 64 * MIB, figures

    return run


def test_twenty_thousand_rows(memory, tmp_path):
    """80 MB of ids, 16 MB of completions; what is held at 5,000 rows is what is held at 20,000."""
    schema = pa.schema([("ids", pa.list_(pa.int32()))])
    rng = np.random.default_rng(3)
    with pq.ParquetWriter(
        tmp_path / "in.parquet", schema, compression="none", use_dictionary=False
    ) as writer:
        for _ in range(10):
            values = pa.array(rng.integers(3, 500, ROWS // 10 * IDS_PER_ROW, dtype=np.int32))
            offsets = pa.array(np.arange(0, len(values) + 1, IDS_PER_ROW, dtype=np.int32))
            writer.write_table(pa.table([pa.ListArray.from_arrays(offsets, values)], schema=schema))
    memory(
        ROWS,
        5_000,
        {"capacity": 256},
        input=tmp_path / "in.parquet",
        token_ids_column="ids",
        max_model_len=256,
        max_tokens=100,
        on_too_long="truncate-left",
        sets=["job.rows_per_part=128", "runtime.seed=1", "scheduler.max_batched_tokens=4096"],
    )


@pytest.mark.parametrize("rows", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_many_small_rows(memory, tmp_path, rows):
    """What is held after the first tenth of the rows is what is held at the end."""
    path = tmp_path / "in.parquet"
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            prompts = pa.array([f"row {row}" for row in range(start, start + 10_000)])
            writer.write_table(pa.table([prompts], schema=schema))
    memory(rows, rows // 10, {"capacity": 512, "short": True}, input=path)
