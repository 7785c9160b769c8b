"""Random checkpoints in the stored format of the release (spec/model.md §2.2, §4.4, §6.4).

Knows: initial values, quantizers, shards. Does not know: what is done with the model.
The bytes depend on preset, cuts and seed only: every chunk of a tensor has its own random stream. At most one
chunk a worker is in memory. The directory appears by one rename, complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import ConfigError, OutputError
from deepinfer_ray.model.checkpoint import INDEX_NAME
from deepinfer_ray.model.engram_ids import compressed_ids
from deepinfer_ray.model.presets import Preset, preset_config
from deepinfer_ray.model.tensors import TensorSpec, expected_tensors, shard_group
from deepinfer_ray.ops.formats import quantize_fp8_groups, quantize_fp8_weight, quantize_mxfp4_weight
from deepinfer_ray.toy.tokenizer import byte_tokenizer, write_tokenizer

CHUNK_ELEMENTS = 2**22
"""Values drawn at a time; part of the format of the random streams, so never a matter of tuning."""

ROW_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `[start, stop)` of a tensor, and of its scale if it has one. Offsets are of row 0 in the file."""

    spec: TensorSpec
    scale: TensorSpec | None
    offset: int
    scale_offset: int
    index: int
    start: int
    stop: int


def preset_files(
    preset: Preset, layers: int | None = None, experts: int | None = None, engram_rows: int | None = None
) -> tuple[dict[str, Any], Tokenizer]:
    """What `config.json` will hold, and the tokenizer that belongs to it."""
    data = preset_config(preset, layers, experts, engram_rows)
    text = data["text_config"]
    tokenizer = byte_tokenizer(text["vocab_size"], text["dspark_noise_token_id"], data["image_token_id"])
    text["engram_compressed_vocab_size"] = int(compressed_ids(tokenizer).max()) + 1
    return data, tokenizer


def make_checkpoint(
    out: str | Path,
    preset: Preset = "tiny",
    seed: int = 0,
    *,
    layers: int | None = None,
    experts: int | None = None,
    engram_rows: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a synthetic checkpoint into the new or empty directory `out` and return it.

    progress: called with (bytes written, bytes in all). Raises `ConfigError` for impossible cuts or an `out`
    that holds something, `OutputError` if the disk cannot take it.
    """
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty directory; remove it or choose another --out")
    data, tokenizer = preset_files(preset, layers, experts, engram_rows)
    config = ModelConfig.from_dict(data)
    specs = expected_tensors(config)
    total = sum(spec.nbytes for spec in specs)
    parent = out.absolute().parent
    temporary = parent / f".{out.name}.tmp-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < total * 1.01:
            raise OutputError(f"{parent}: the checkpoint needs {total:,} bytes, {free:,} are free")
        temporary.mkdir()
        try:
            (temporary / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
            write_tokenizer(tokenizer, temporary, config.text.max_position_embeddings)
            _write_shards(temporary, specs, config, seed, workers, progress)
            os.replace(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{out}: writing the checkpoint failed: {error.strerror or error}") from None
    return out


def _write_shards(
    directory: Path,
    specs: list[TensorSpec],
    config: ModelConfig,
    seed: int,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """One shard a group of `shard_group`, then the index."""
    groups: dict[str, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        groups[shard_group(spec.name)].append(spec)
    total, written = sum(spec.nbytes for spec in specs), 0
    weight_map: dict[str, str] = {}
    workers = workers or min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for number, members in enumerate(groups.values(), 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            _write_shard(directory / name, members, config, seed, pool, workers)
            weight_map |= dict.fromkeys((spec.name for spec in members), name)
            written += sum(spec.nbytes for spec in members)
            if progress is not None:
                progress(written, total)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_shard(
    path: Path,
    specs: list[TensorSpec],
    config: ModelConfig,
    seed: int,
    pool: ThreadPoolExecutor,
    workers: int,
) -> None:
    """Header first, then all chunks in any order at their places."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.name] = end
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    offsets = {name: offset + start for name, offset in offsets.items()}
    room = BoundedSemaphore(2 * workers)
    with open(path, "wb", buffering=0) as file:
        fd = file.fileno()
        _pwrite(fd, len(encoded).to_bytes(8, "little") + encoded, 0)
        os.truncate(fd, start + end)

        def write(chunk: Chunk) -> None:
            try:
                for data, offset in chunk_bytes(chunk, config, seed):
                    _pwrite(fd, data, offset)
            finally:
                room.release()

        jobs = []
        for chunk in _chunks(specs, offsets):
            room.acquire()
            jobs.append(pool.submit(write, chunk))
        for job in jobs:
            job.result()


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _chunks(specs: list[TensorSpec], offsets: dict[str, int]) -> Iterator[Chunk]:
    """Row ranges of whole 32-row blocks, about `CHUNK_ELEMENTS` values each; scales go with their weight."""
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        if spec.dtype == "F8_E8M0":
            continue
        scale = (
            by_name.get(spec.name.removesuffix(".weight") + ".scale")
            if spec.dtype in ("F8_E4M3", "I8")
            else None
        )
        rows = spec.shape[0]
        per_row = max(1, spec.parameters // rows)
        step = max(ROW_BLOCK, CHUNK_ELEMENTS // per_row // ROW_BLOCK * ROW_BLOCK)
        for index, start in enumerate(range(0, rows, step)):
            scale_offset = offsets[scale.name] if scale else 0
            yield Chunk(spec, scale, offsets[spec.name], scale_offset, index, start, min(rows, start + step))


def chunk_bytes(chunk: Chunk, config: ModelConfig, seed: int) -> list[tuple[memoryview, int]]:
    """The stored bytes of a chunk with their file offsets: weight rows, then scale rows."""
    spec, rows = chunk.spec, chunk.stop - chunk.start
    columns = spec.parameters // spec.shape[0]
    key = hashlib.sha256(f"{seed}/{spec.name}/{chunk.index}".encode()).digest()
    rng = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
    values = torch.from_numpy(initial_values(spec, rows, columns, rng, config)).view(rows, columns)
    if spec.dtype == "F32":
        parts = [values]
    elif spec.dtype == "BF16":
        parts = [values.to(torch.bfloat16)]
    elif spec.dtype == "I8":
        parts = list(quantize_mxfp4_weight(values))
    elif spec.name.endswith(".engram.embed.weight"):
        parts = list(quantize_fp8_groups(values))
    else:
        parts = list(quantize_fp8_weight(values))
    row_bytes = spec.nbytes // spec.shape[0]
    written = [(_bytes(parts[0]), chunk.offset + chunk.start * row_bytes)]
    if chunk.scale is not None:
        scale = chunk.scale
        per_block = ROW_BLOCK if scale.shape[0] != spec.shape[0] else 1
        scale_row = chunk.start // per_block * (scale.nbytes // scale.shape[0])
        written.append((_bytes(parts[1]), chunk.scale_offset + scale_row))
    return written


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def initial_values(
    spec: TensorSpec, rows: int, columns: int, rng: np.random.Generator, config: ModelConfig
) -> np.ndarray:
    """float32 [rows * columns] of spec/model.md §6.4. `columns` are logical features, not packed bytes."""
    name, n = spec.name, rows * columns
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("_base") and leaf.startswith("hc_"):
        return _mix_base(_layer_number(name, config), config.text.hc_mult)
    if leaf.endswith("_scale") and leaf.startswith("hc_"):
        return np.full(n, 0.01, np.float32)
    if leaf == "attn_sink":
        return np.zeros(n, np.float32)
    if leaf in ("q_weight", "k_weight"):
        return np.ones(n, np.float32)
    normal = rng.standard_normal(n, dtype=np.float32)
    if len(spec.shape) == 1 and "norm" in name:
        return 1 + np.float32(0.1) * normal
    if leaf in ("bias", "bias_vl"):
        return np.float32(0.02) * normal
    if name.startswith("image_") or re.search(r"(^|\.)embed\.weight$", name):
        return normal
    return normal * np.float32(columns**-0.5)


def _layer_number(name: str, config: ModelConfig) -> int:
    kind, number = name.split(".")[:2]
    return int(number) + (config.topology.num_layers if kind == "mtp" else 0)


def _mix_base(layer: int, m: int) -> np.ndarray:
    """Biases of pre, post and comb: the sublayer reads copy `layer % m`, copies keep to themselves."""
    base = np.full((2 + m) * m, -3.0, np.float32)
    base[layer % m] = 3.0
    base[m : 2 * m] = 0.0
    base[2 * m :: m + 1] = 3.0
    return base
