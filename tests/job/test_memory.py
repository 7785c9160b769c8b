"""The driver's memory does not grow with the number of rows."""

from __future__ import annotations

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stub_backend import StubBackend

ROWS, IDS_PER_ROW = 20_000, 1_000
MIB = 1 << 20


def test_twenty_thousand_rows(job, tmp_path):
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
    process = psutil.Process()
    samples = []

    def sample(stub):
        if not samples or stub.submitted - samples[-1][0] >= 500:
            samples.append((stub.submitted, process.memory_info().rss))

    config = ["job.rows_per_part=128", "runtime.seed=1", "scheduler.max_batched_tokens=4096"]
    outcome = job(
        input=tmp_path / "in.parquet",
        token_ids_column="ids",
        max_model_len=256,
        max_tokens=100,
        on_too_long="truncate-left",
        stub=StubBackend(capacity=256, on_poll=sample),
        sets=config,
    )
    assert outcome.summary.counts.ok == ROWS
    settled = max(rss for rows, rss in samples if 2_000 <= rows < 5_000)
    later = max(rss for rows, rss in samples if rows >= 5_000)
    print(f"settled {settled / MIB:.0f} MiB, later {later / MIB:.0f} MiB")
    assert len(samples) > 20
    assert later - settled < 24 * MIB, [(rows, rss // MIB) for rows, rss in samples]


@pytest.mark.parametrize("rows", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_many_small_rows(job, tmp_path, rows):
    """What is held after the first tenth of the rows is what is held at the end."""
    path = tmp_path / "in.parquet"
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            prompts = pa.array([f"row {row}" for row in range(start, start + 10_000)])
            writer.write_table(pa.table([prompts], schema=schema))
    process = psutil.Process()
    samples = []

    def sample(stub):
        if not samples or stub.submitted - samples[-1][0] >= rows // 200:
            samples.append((stub.submitted, process.memory_info().rss))

    stub = StubBackend(capacity=512, on_poll=sample, answer=lambda item: ([70, 71], "CD", "length"))
    outcome = job(input=path, stub=stub)
    assert outcome.summary.counts.ok == rows
    settled = max(rss for row, rss in samples if row < rows // 10)
    later = max(rss for row, rss in samples if row >= rows // 10)
    print(f"settled {settled / MIB:.0f} MiB, later {later / MIB:.0f} MiB")
    assert len(samples) > 50
    assert later - settled < 24 * MIB, [(row, rss // MIB) for row, rss in samples]
