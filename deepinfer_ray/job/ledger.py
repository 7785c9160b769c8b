"""What is done and who does it: the output directory, its manifest and its lease.

Knows: names in the output directory and what a manifest must agree on. Does not know: rows, models, ranks.
A part that is listed is complete; nothing else records progress, so a resume needs nothing but the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from deepinfer_ray.errors import CheckpointError, ConfigError, InputError, OutputError
from deepinfer_ray.job.plan import InputPlan, Part
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.store import TEMPORARY, Store

MANIFEST = "_deepinfer/manifest.json"
CONFIG = "_deepinfer/config.json"
SUMMARY = "_deepinfer/summary.json"
QUARANTINE = "_deepinfer/quarantine"
"""A file for each part with failed rows: their ids, codes and messages."""

COLUMN_SETTINGS = ("n", "output_prefix")
"""Settings that decide the columns of parts: no flag lets them change within one output."""

_PART = re.compile(r"part-\d{6,}-\d{4,}\.parquet")
_READ_THREADS = 8
_SHOWN_CHANGES = 8


class Ledger:
    """The committed parts of one output directory. `open_manifest` before anything else."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifest: dict[str, Any] = {}
        self.removed_temporary = 0
        self.foreign: list[str] = []
        self._quarantined: frozenset[str] | None = None  # files of an earlier run; None: not looked up yet

    def stored_manifest(self) -> dict[str, Any] | None:
        """The manifest of an earlier run, None for a new output. Raises `OutputError` if unreadable."""
        raw = self.store.read(MANIFEST)
        if raw is None:
            return None
        try:
            return dict(json.loads(raw))
        except ValueError as error:
            raise OutputError(
                f"{self.store.path(MANIFEST)} is no JSON ({error}); it is written once and never edited. "
                "Use another --output"
            ) from None

    def open_manifest(self, wanted: Mapping[str, Any], allow_changed: bool) -> list[str]:
        """Start or resume: write the manifest, or compare with the one that is there.

        Returns the differences that `allow_changed` lets pass. Raises `ConfigError` naming what changed, and,
        whatever the flag, when the row ranges of committed parts would no longer fit.
        """
        self.removed_temporary = self.store.clear_temporary()
        stored = self.stored_manifest()
        if stored is None:
            if self.part_names():
                raise ConfigError(
                    f"{self.store.location} holds parts but no {MANIFEST}: it is not an output of this "
                    "program, or the file was removed. Use another --output"
                )
            self.manifest = dict(wanted)
            self.write_json(MANIFEST, self.manifest)
            return []
        self.manifest = stored
        changes = describe_changes(_compared(stored), _compared(wanted))
        if not changes:
            return []
        shown = "; ".join(changes[:_SHOWN_CHANGES])
        if len(changes) > _SHOWN_CHANGES:
            shown += f"; and {len(changes) - _SHOWN_CHANGES} more"
        if _ranges(stored) != _ranges(wanted):
            raise ConfigError(
                f"the output {self.store.location} was begun for other rows or columns, its parts would not "
                f"fit: {shown}. Use another --output"
            )
        if not allow_changed:
            raise ConfigError(
                f"the output {self.store.location} was begun with something else: {shown}. Use another "
                "--output, undo the change, or give --allow-changed to run the remaining rows as they are now"
            )
        return changes

    def done(self, plan: InputPlan) -> set[str]:
        """Names of the plan's parts that are committed. Part files the plan does not know go to `foreign`."""
        there = self.part_names()
        done = {part.name for part in plan.iter_parts() if part.name in there} if there else set()
        self.foreign = sorted(there - done)
        return done

    def counts(self, names: set[str]) -> dict[str, Counts]:
        """Counts of committed parts by name, from their footers. Raises `OutputError`."""
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            ordered = sorted(names)
            return dict(zip(ordered, pool.map(self._part_counts, ordered), strict=True))

    def read_part(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """A committed part, all columns or those of `columns` that it has. Raises `OutputError`."""
        with self.readable(name), self.store.filesystem.open_input_file(self.store.path(name)) as file:
            return pq.ParquetFile(file).read(columns, use_threads=False)

    def commit(self, part: Part, fill: Callable[[Any], None]) -> None:
        """Make a part visible, whole. Raises `OutputError`."""
        self.store.write(part.name, fill)

    def quarantine(self, part: Part, failures: bytes) -> None:
        """Keep the failed rows of a part as JSON lines, before the part itself; none removes earlier ones.

        Raises `OutputError`.
        """
        name = f"{part.name.removesuffix('.parquet')}.jsonl"
        if self._quarantined is None:
            self._quarantined = frozenset(self.store.names(QUARANTINE))
        if failures:
            self.store.make_folder(QUARANTINE)
            self.store.write(f"{QUARANTINE}/{name}", lambda file: file.write(failures))
        elif name in self._quarantined:
            self.store.take(f"{QUARANTINE}/{name}")

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        data = json.dumps(content, indent=1, ensure_ascii=False).encode()
        self.store.write(name, lambda file: file.write(data))

    def part_names(self) -> set[str]:
        """Names of the committed parts."""
        return {name for name in self.store.names() if _PART.fullmatch(name)}

    def close(self) -> None:
        """Leave no temporary folder behind."""
        with contextlib.suppress(OSError):
            if not self.store.names(TEMPORARY):
                self.store.filesystem.delete_dir(self.store.path(TEMPORARY))

    def _part_counts(self, name: str) -> Counts:
        with self.readable(name), self.store.filesystem.open_input_file(self.store.path(name)) as file:
            metadata = pq.read_metadata(file)
        return Counts.from_footer(metadata.metadata, metadata.num_rows)

    @contextlib.contextmanager
    def readable(self, name: str) -> Iterator[None]:
        """Turn an error while a part is read into an `OutputError` that says what to do."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise OutputError(
                f"the committed part {self.store.path(name)} cannot be read: {error}. "
                "Delete it and run the same command again; its rows are redone"
            ) from None


def build_manifest(
    *,
    version: str,
    plan: InputPlan,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    created: str,
) -> dict[str, Any]:
    """The manifest of a run. `settings`: what a row's result depends on, besides input and model; only this
    part of the configuration is compared on resume, `config` is for the reader."""
    return {
        "format": 1,
        "version": version,
        "created": created,
        "rows": plan.rows,
        "limit": plan.limit,
        "inputs": [file.layout() for file in plan.files],
        "settings": dict(settings),
        "model": dict(model),
        "config": dict(config),
    }


def model_fingerprint(model_dir: str | Path) -> dict[str, Any]:
    """Hashes of config.json, tokenizer and index; name, size and header hash of every shard.

    Raises `CheckpointError` when the directory or a file cannot be read.
    """
    root = Path(model_dir)
    result: dict[str, Any] = {}
    try:
        if not (root / "config.json").is_file():
            raise CheckpointError(f"the model directory {root} has no config.json")
        for path in sorted(root.iterdir()):
            if path.suffix == ".json" and path.is_file():
                result[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.suffix == ".safetensors":
                with open(path, "rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    header = file.read(min(length, path.stat().st_size))
                result[path.name] = {
                    "size": path.stat().st_size,
                    "header_sha256": hashlib.sha256(header).hexdigest(),
                }
    except OSError as error:
        raise CheckpointError(f"cannot read the model directory {root}: {error}") from None
    return result


def digest(content: Any) -> str:
    """SHA-256 of the canonical JSON of `content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def planned_rows_per_part(manifest: Mapping[str, Any]) -> dict[str, list[int]]:
    """Per input file, the row ranges that an earlier run fixed; a resumed run keeps them."""
    return {str(file["name"]): list(file["rows_per_part"]) for file in manifest.get("inputs", ())}


def describe_changes(before: Any, now: Any, where: str = "") -> list[str]:
    """One text per differing leaf: `settings.temperature: 0.0 → 1.0`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            change
            for key in sorted({*before, *now}, key=str)
            for change in describe_changes(
                before.get(key), now.get(key), f"{where}.{key}" if where else str(key)
            )
        ]
    if before == now:
        return []
    return [f"{where}: {_short(before)} → {_short(now)}"]


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False) if value == "" or not isinstance(value, str) else value
    return text if len(text) <= 40 else f"{text[:12]}…"


def _compared(manifest: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {
        str(file["name"]): {key: value for key, value in file.items() if key != "name"}
        for file in manifest.get("inputs", ())
    }
    return {
        "input": inputs,
        "limit": manifest.get("limit"),
        "settings": manifest.get("settings"),
        "model": manifest.get("model"),
    }


def _ranges(manifest: Mapping[str, Any]) -> Any:
    if not isinstance(manifest.get("inputs"), list):
        raise InputError("the manifest has no list of inputs; use another --output")
    settings = manifest.get("settings", {})
    files = [(file["name"], file["row_groups"], file["rows_per_part"]) for file in manifest["inputs"]]
    return json.loads(
        json.dumps([files, manifest.get("rows"), *(settings.get(name) for name in COLUMN_SETTINGS)])
    )
