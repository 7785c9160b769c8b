"""What a checkpoint holds, and what of it each rank would hold (spec/model.md §5, §2.6).

Knows: counts and bytes from config and headers. Does not know: devices, caches. A directory with only a
`config.json` (or that file) gives what a checkpoint for it must hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from deepinfer_ray.config.hf import ModelConfig, gpu_capability_problems
from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.model.checkpoint import (
    INDEX_NAME,
    coverage_problems,
    format_problems,
    locate_tensors,
)
from deepinfer_ray.model.engram_ids import checked_compressed_ids, load_tokenizer
from deepinfer_ray.model.tensors import (
    COMPONENTS,
    DRAFT_EXPERTS,
    ENGRAM_TABLES,
    ROUTED,
    TensorSpec,
    expected_tensors,
)
from deepinfer_ray.parallel.expert_map import physical_experts

EP_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """The JSON object of `inspect`: tensors, bytes, parameters, components, ranks, problems.

    Counts are those of the tensors that the config asks for. problems: what is missing or of the wrong kind
    in the files, empty for a good checkpoint. `ConfigError` if `config.json` itself is unusable.
    """
    path = Path(path)
    config = ModelConfig.load(path)
    specs = expected_tensors(config)
    directory = path if path.is_dir() else path.parent
    held = path.is_dir() and (directory / INDEX_NAME).exists()
    lonely = not held and not any(directory.glob("*.safetensors"))
    return {
        "tensors": len(specs),
        "bytes": sum(spec.nbytes for spec in specs),
        "parameters": sum(spec.parameters for spec in specs),
        "components": components(specs),
        "ranks": rank_bytes(config, specs),
        "problems": [] if lonely or not path.is_dir() else stored_problems(directory, config, specs),
        "config_only": lonely or not path.is_dir(),
        "gpu_problems": gpu_capability_problems(config),
    }


def components(specs: list[TensorSpec]) -> list[dict[str, Any]]:
    """Sums by component, in the order of spec/model.md §5, empty ones left out."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for spec in specs:
        row = sums[spec.component]
        row[0] += 1
        row[1] += spec.parameters
        row[2] += spec.nbytes
    return [
        {"name": name, "tensors": sums[name][0], "parameters": sums[name][1], "bytes": sums[name][2]}
        for name in COMPONENTS
        if name in sums
    ]


def packed_scale_growth(specs: list[TensorSpec]) -> int:
    """Bytes by which FP8 linears grow when every row carries its own scales, four to an int32."""
    shapes = {spec.name: spec for spec in specs}
    growth = 0
    for spec in specs:
        if spec.dtype != "F8_E4M3" or spec.component == ENGRAM_TABLES:
            continue
        scale = shapes[spec.name.removesuffix(".weight") + ".scale"]
        growth += spec.shape[0] * math.ceil(spec.shape[1] / 128) * 4 - scale.nbytes
    return growth


def rank_bytes(config: ModelConfig, specs: list[TensorSpec]) -> list[dict[str, Any]]:
    """Weights of every rank for each EP size, all but routed experts and Engram tables replicated.

    Padding makes the ranks of a group equal. `bytes` is device memory; the Engram share, in host memory
    unless configured otherwise, counts beside it.
    """
    text, topology = config.text, config.topology
    total: dict[str, int] = defaultdict(int)
    for spec in specs:
        total[spec.component] += spec.nbytes
    replicated = sum(total.values()) - total[ROUTED] - total[DRAFT_EXPERTS] - total[ENGRAM_TABLES]
    replicated += packed_scale_growth(specs)
    D, M = text.hidden_size, text.moe_intermediate_size
    expert = 3 * (D * M // 2 + D * M // 32)
    rows = []
    for ep in EP_SIZES:
        backbone = physical_experts(text.n_routed_experts, ep) // ep
        drafts = physical_experts(text.dspark_n_routed_experts, ep) // ep if text.has_drafter else 0
        routed = backbone * topology.num_layers * expert
        draft_routed = drafts * topology.num_draft_layers * expert
        share = engram_share(config, ep)
        rows += [
            {
                "ep": ep,
                "rank": rank,
                "bytes": routed + draft_routed + replicated,
                "experts": backbone,
                "draft_experts": drafts,
                "routed_bytes": routed,
                "draft_routed_bytes": draft_routed,
                "replicated_bytes": replicated,
                "engram_bytes": share,
            }
            for rank in range(ep)
        ]
    return rows


def engram_share(config: ModelConfig, ranks: int) -> int:
    """Bytes of one rank's rows of all tables: rows padded to a multiple of lcm(256, ranks)."""
    row_bytes = config.text.engram_head_dim * 33 // 32
    unit = math.lcm(256, ranks)
    return sum(-(-rows // unit) * unit // ranks * row_bytes for rows in config.engram.rows)


def stored_problems(directory: Path, config: ModelConfig, specs: list[TensorSpec]) -> list[str]:
    """What keeps the directory from being a complete checkpoint, drafter and tower included."""
    problems = []
    try:
        where = locate_tensors(directory)
    except CheckpointError as error:
        problems.append(str(error))
    else:
        problems += coverage_problems(specs, where)
        problems += format_problems([spec for spec in specs if spec.name in where], where)
    try:
        tokenizer = load_tokenizer(directory)
        if config.text.has_engram:
            checked_compressed_ids(tokenizer, config.text.engram_compressed_vocab_size)
        elif tokenizer.get_vocab_size() > config.text.vocab_size:
            problems.append(
                f"tokenizer.json has {tokenizer.get_vocab_size()} ids, the model {config.text.vocab_size}"
            )
    except CheckpointError as error:
        problems.append(str(error))
    return problems
