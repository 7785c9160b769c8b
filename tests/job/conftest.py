"""Fixtures of the job tests: a model directory without weights, data sets, jobs with the stub backend."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stub_backend import StubBackend

from deepinfer_ray.chat.tokens import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    PAD,
    SYSTEM,
    THINK,
    USER,
)
from deepinfer_ray.config.load import load_config
from deepinfer_ray.job.generate import generate
from deepinfer_ray.job.signals import StopSignals

TINY = Path(__file__).parents[1] / "data/golden/tinyB"
CONTROL = {0: BOS, 1: EOS, 2: PAD} | {
    300 + i: spelling
    for i, spelling in enumerate((USER, END_THINK, THINK, ASSISTANT, SYSTEM, DSML, LATEST_REMINDER))
}


def byte_tokenizer() -> str:
    """A byte-level BPE without merges: byte b has id b + 3; control tokens as added tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    added = [
        {"id": token, "content": text, "special": token < 3, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for token, text in CONTROL.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {chars[byte]: byte + 3 for byte in range(256)}
    vocabulary |= {text: token for token, text in CONTROL.items()}  # or they would be numbered anew
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    shutil.copy(TINY / "config.json", root)
    (root / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def spell():
    """spell(text) → ids in which control tokens are their own; spell.text(ids) is the way back."""
    ids_of = {text: token for token, text in CONTROL.items()}
    cut = re.compile("(" + "|".join(map(re.escape, ids_of)) + ")")

    def ids(text):
        pieces = [
            [ids_of[piece]] if piece in ids_of else [b + 3 for b in piece.encode()]
            for piece in cut.split(text)
        ]
        return [token for piece in pieces for token in piece]

    def text(ids):
        raw = b"".join(CONTROL[token].encode() if token in CONTROL else bytes([token - 3]) for token in ids)
        return raw.decode(errors="replace")

    ids.text = text
    return ids


@pytest.fixture
def write_rows():
    """write_rows(path, columns or table, group=rows of a row group) → path."""

    def write(path, table, group=None):
        table = table if isinstance(table, pa.Table) else pa.table(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=group)
        return path

    return write


@pytest.fixture
def job(model_dir, tmp_path):
    """job(input=…, output=…, flags…, stub=StubBackend(), sets=[…]) → outcome; `.said` are its lines."""

    def run(stub=None, sets=(), signals=None, **options):
        flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        flags.setdefault("--model", str(model_dir))
        flags.setdefault("--output", str(tmp_path / "out"))
        flags["--input"] = [str(path) for path in _listed(flags["--input"])]
        run.said = []
        run.stub = stub if stub is not None else StubBackend()
        config = load_config((), sets, flags, {})
        with signals or StopSignals() as active:
            return generate(config, lambda engine, model: run.stub, run.said.append, active)

    return run


def _listed(value):
    return value if isinstance(value, list) else [value]


@pytest.fixture
def read_output():
    """read_output(directory) → rows of all parts in part order, as dicts."""

    def read(directory):
        parts = sorted(Path(directory).glob("part-*.parquet"))
        return [row for part in parts for row in pq.ParquetFile(part).read().to_pylist()]

    return read


@pytest.fixture
def driver(model_dir, tmp_path):
    """driver(stub options, flags…) → Popen of a driver process with the stub backend."""

    def start(stub, sets=(), **options):
        flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        flags.setdefault("--model", str(model_dir))
        flags.setdefault("--output", str(tmp_path / "out"))
        flags["--input"] = [str(path) for path in _listed(flags["--input"])]
        script = Path(__file__).parent / "driver.py"
        return subprocess.Popen(
            [sys.executable, str(script), json.dumps(stub), json.dumps(flags), json.dumps(list(sets))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
