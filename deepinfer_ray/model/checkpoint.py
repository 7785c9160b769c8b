"""A checkpoint directory: checked from its headers before a byte of data is read, then read in pieces.

Knows: index and shards, coverage, dtypes and shapes, all of spec/model.md §2.5 in its order. Does not know:
what a tensor means, devices, ranks. Names are stored names without the optional prefix
`model.`; nothing is cast.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.model.shards import (
    TORCH_DTYPES,
    ShardFile,
    TensorEntry,
    byte_view,
    read_header,
)
from deepinfer_ray.model.tensors import TensorSpec, expected_tensors

INDEX_NAME = "model.safetensors.index.json"
PREFIX = "model."
LOAD_LIMIT_S = 1800.0
ENGRAM_SCALE_ONE = 127
"""ue8m0 byte of the scale 1."""

_UNFOLDED_NORM = re.compile(r"(?:^|\.)hc_(?:attn|ffn|head)_norm\.weight$")
_EXPERT = re.compile(r"^(?P<layer>(?:layers|mtp)\.\d+)\.ffn\.experts\.(?P<expert>\d+)\.(?P<part>.+)$")
_SHOWN = 10


class Experts(NamedTuple):
    """Weights of some experts of one layer, stacked: n experts, M width, D hidden.

    w13: int8 [n, 2M, D/2], gate rows (w1) before up rows (w3). w2: int8 [n, D, M/2]. Scales: float8_e8m0fnu,
    one for 32 columns.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


class Checkpoint:
    """An opened, fully validated checkpoint. Use `open`; close it or use it as a context manager."""

    def __init__(
        self, path: Path, config: ModelConfig, where: Mapping[str, tuple[ShardFile, TensorEntry]]
    ) -> None:
        self.path = path
        self.config = config
        self._where = where
        self._check_time: Callable[[], None] | None = None

    @classmethod
    def open(cls, path: str | Path, *, drafter: bool = False, vision: bool = False) -> Checkpoint:
        """Read config, index and headers; raise `ConfigError` or `CheckpointError` on anything that is wrong.

        drafter, vision: whether the `mtp.*` tensors and the tower must be there (when the config has them).
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: is not a directory; give the directory that holds config.json")
        config = ModelConfig.load(path)
        where = locate_tensors(path)
        specs = {spec.name: spec for spec in expected_tensors(config)}
        needed = [spec for spec in specs.values() if is_needed(spec, drafter=drafter, vision=vision)]
        check_coverage(path, needed, where)
        check_formats([spec for spec in specs.values() if spec.name in where], where)
        return cls(path, config, where)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        for shard in {id(shard): shard for shard, _ in self._where.values()}.values():
            shard.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterator[str]:
        """All stored names, unknown ones included."""
        return iter(self._where)

    def entry(self, name: str) -> TensorEntry:
        """dtype, shape and byte range of a stored tensor."""
        return self._find(name)[1]

    def shard_path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._find(name)[0].path

    def _find(self, name: str) -> tuple[ShardFile, TensorEntry]:
        try:
            return self._where[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name}") from None

    @contextmanager
    def loading(
        self, limit_s: float = LOAD_LIMIT_S, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[None]:
        """Within this block a read that starts later than `limit_s` after entry raises `CheckpointError`."""
        start = clock()

        def check() -> None:
            if clock() - start > limit_s:
                raise CheckpointError(
                    f"{self.path}: loading takes longer than {limit_s:.0f} s; is the file system stuck? "
                    "Copy the checkpoint to a local disk"
                )

        self._check_time = check
        try:
            yield
        finally:
            self._check_time = None

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in its stored dtype, on the CPU."""
        shard, entry = self._find(name)
        out = torch.empty(entry.shape, dtype=_torch_dtype(shard.path, name, entry))
        shard.read_into(byte_view(out), entry.begin, name, self._check_time)
        return out

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` of dimension 0, in the stored dtype; only their bytes are read."""
        _, entry = self._find(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise CheckpointError(f"{name}: rows [{start}, {stop}) are outside its shape {list(entry.shape)}")
        out = torch.empty((stop - start, *entry.shape[1:]), dtype=_torch_dtype(self.path, name, entry))
        self.read_rows_into(name, start, out)
        return out

    def read_rows_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` [n, ...] (contiguous, stored dtype) with rows `[start, start + n)`."""
        shard, entry = self._find(name)
        if out.shape[1:] != entry.shape[1:] or out.dtype != TORCH_DTYPES.get(entry.dtype):
            raise CheckpointError(
                f"{shard.path}: {name} is {entry.dtype} {list(entry.shape)}, it cannot fill rows of "
                f"{out.dtype} {list(out.shape)}"
            )
        if not 0 <= start <= start + out.shape[0] <= entry.shape[0]:
            raise CheckpointError(
                f"{name}: rows [{start}, {start + out.shape[0]}) are outside its shape {list(entry.shape)}"
            )
        row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0])
        shard.read_into(byte_view(out), entry.begin + start * row_bytes, name, self._check_time)

    def read_experts(self, layer_prefix: str, experts: Sequence[int]) -> Experts:
        """Some routed experts of `layers.{l}` or `mtp.{i}`, in the order given; an id may occur again.

        Each expert is read straight into its place of the stacked result.
        """
        M, half_D = self.entry(f"{layer_prefix}.ffn.experts.0.w1.weight").shape
        D, half_M = self.entry(f"{layer_prefix}.ffn.experts.0.w2.weight").shape
        n, e8m0 = len(experts), torch.float8_e8m0fnu
        stack = Experts(
            torch.empty(n, 2 * M, half_D, dtype=torch.int8),
            torch.empty(n, 2 * M, half_D // 16, dtype=e8m0),
            torch.empty(n, D, half_M, dtype=torch.int8),
            torch.empty(n, D, half_M // 16, dtype=e8m0),
        )
        for place, expert in enumerate(experts):
            prefix = f"{layer_prefix}.ffn.experts.{expert}"
            for kind, w13, w2 in (
                ("weight", stack.w13, stack.w2),
                ("scale", stack.w13_scale, stack.w2_scale),
            ):
                self.read_rows_into(f"{prefix}.w1.{kind}", 0, w13[place, :M])
                self.read_rows_into(f"{prefix}.w3.{kind}", 0, w13[place, M:])
                self.read_rows_into(f"{prefix}.w2.{kind}", 0, w2[place])
        return stack

    def read_engram_rows(self, layer_id: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[start, stop)` of a layer's Engram table: e4m3 weight [n, width], ue8m0 scale [n, width/32].

        Rows past the table's end, which pad the last rank's share, are weight 0 and scale 1.
        """
        parts = []
        for kind, fill in (("weight", 0), ("scale", ENGRAM_SCALE_ONE)):
            name = f"layers.{layer_id}.engram.embed.{kind}"
            shard, entry = self._find(name)
            if not (0 <= start < entry.shape[0] or start == stop == entry.shape[0]) or stop < start:
                raise CheckpointError(
                    f"{name}: rows [{start}, {stop}) start outside its {entry.shape[0]} rows"
                )
            out = torch.empty((stop - start, entry.shape[1]), dtype=_torch_dtype(shard.path, name, entry))
            stored = min(stop, entry.shape[0]) - start
            self.read_rows_into(name, start, out[:stored])
            out[stored:].view(torch.uint8).fill_(fill)
            parts.append(out)
        return parts[0], parts[1]


def _torch_dtype(path: Path, name: str, entry: TensorEntry) -> torch.dtype:
    try:
        return TORCH_DTYPES[entry.dtype]
    except KeyError:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {entry.dtype}") from None


def is_needed(spec: TensorSpec, *, drafter: bool, vision: bool) -> bool:
    """Whether a run needs a tensor: the drafter's and the tower's only if they are used."""
    if spec.required:
        return True
    return drafter if spec.name.startswith("mtp.") else vision


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of a checkpoint directory: stored name → shard file name."""
    file = path / INDEX_NAME
    try:
        data = json.loads(file.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: no such file; a checkpoint needs its index beside the shards"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}; fetch it again") from None
    weight_map: Any = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: holds no weight_map; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(f"{file}: tensor {name} lies in {shard!r}, which is not a file name")
    return weight_map


def locate_tensors(path: Path) -> dict[str, tuple[ShardFile, TensorEntry]]:
    """Steps 1–4 of the validation: index, shards, names, headers. Names lose the prefix `model.`."""
    index_file, weight_map = path / INDEX_NAME, read_index(path)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}"
        )
    unfolded = [name for name in weight_map if _UNFOLDED_NORM.search(name)]
    if unfolded:
        raise CheckpointError(
            f"{index_file}: {_some(unfolded)}: the norm weight must be folded into hc_*_fn; "
            "convert the checkpoint"
        )
    names = _strip_prefix(weight_map, index_file)
    files = {shard: _open_shard(path / shard) for shard in shards}
    where: dict[str, tuple[ShardFile, TensorEntry]] = {}
    absent = []
    for name, stored in names.items():
        shard = files[weight_map[stored]]
        entry = shard.entries.get(name)
        if entry is None:
            absent.append(f"{stored} ({shard.path.name})")
        else:
            where[name] = (shard, entry)
    if absent:
        raise CheckpointError(
            f"{index_file}: {_some(absent)} in the index but not in the shard that it names"
        )
    return where


def _open_shard(path: Path) -> ShardFile:
    header = read_header(path)
    return ShardFile(path, {name: header[stored] for name, stored in _strip_prefix(header, path).items()})


def _strip_prefix(names: Mapping[str, object], source: Path) -> dict[str, str]:
    """Bare name → stored name; both forms of one name are an error."""
    bare: dict[str, str] = {}
    for stored in names:
        name = stored.removeprefix(PREFIX)
        if name in bare:
            raise CheckpointError(
                f"{source}: holds both {bare[name]} and {stored}, which are the same tensor"
            )
        bare[name] = stored
    return bare


def _some(names: Sequence[str]) -> str:
    """The first names and the count."""
    text = ", ".join(names[:_SHOWN])
    return f"{text} and {len(names) - _SHOWN} more ({len(names)} tensors)" if len(names) > _SHOWN else text


def check_coverage(path: Path, needed: Sequence[TensorSpec], where: Mapping[str, object]) -> None:
    """Step 5: plain tensors, experts layer by layer, Engram tables; `CheckpointError` with the full list."""
    problems = coverage_problems(needed, where)
    if problems:
        raise CheckpointError(f"{path}: the checkpoint is incomplete: " + "; ".join(problems))


def coverage_problems(needed: Sequence[TensorSpec], where: Mapping[str, object]) -> list[str]:
    """What `check_coverage` complains about: one text for plain tensors, one for each layer's experts."""
    plain: list[str] = []
    experts: dict[str, dict[int, list[str]]] = defaultdict(dict)
    wanted: dict[str, int] = defaultdict(int)
    for spec in needed:
        match = _EXPERT.match(spec.name)
        if match is None:
            if spec.name not in where:
                plain.append(spec.name)
            continue
        layer, expert = match["layer"], int(match["expert"])
        wanted[layer] = max(wanted[layer], expert + 1)
        if spec.name not in where:
            experts[layer].setdefault(expert, []).append(match["part"])
    problems = [f"missing {', '.join(plain)}"] if plain else []
    for layer, missing in experts.items():
        parts = ", ".join(f"{expert} ({' '.join(parts)})" for expert, parts in sorted(missing.items()))
        problems.append(
            f"{layer}.ffn.experts: {len(missing)} of {wanted[layer]} experts incomplete or missing: {parts}"
        )
    surplus: dict[str, set[int]] = defaultdict(set)
    for name in where:
        match = _EXPERT.match(name)
        if match and match["layer"] in wanted and int(match["expert"]) >= wanted[match["layer"]]:
            surplus[match["layer"]].add(int(match["expert"]))
    for layer, ids in surplus.items():
        problems.append(
            f"{layer}.ffn.experts: holds experts {sorted(ids)}, but config.json says {wanted[layer]}"
        )
    return problems


def check_formats(specs: Sequence[TensorSpec], where: Mapping[str, tuple[ShardFile, TensorEntry]]) -> None:
    """Step 6: stored dtype and shape are the model's; nothing is ever cast."""
    problems = format_problems(specs, where)
    if problems:
        raise CheckpointError(
            _some(problems) + "; nothing is cast, convert the checkpoint or correct config.json"
        )


def format_problems(
    specs: Sequence[TensorSpec], where: Mapping[str, tuple[ShardFile, TensorEntry]]
) -> list[str]:
    """One line for each tensor whose stored dtype or shape is not the model's."""
    problems = []
    for spec in specs:
        shard, entry = where[spec.name]
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            problems.append(
                f"{shard.path}: {spec.name} is {entry.dtype} {list(entry.shape)}, the model needs "
                f"{spec.dtype} {list(spec.shape)}"
            )
    return problems
