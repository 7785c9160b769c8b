"""Completions inside a Ray Data pipeline: `build_processor`, or `BatchPredictor` in a `map_batches`.

ds = ray.data.read_parquet("prompts/")
ds = build_processor(ProcessorConfig(model="MODEL", max_tokens=256, id_column="id"))(ds)
ds.write_parquet("completions/")
"""

from __future__ import annotations

from deepinfer_ray.data.config import ProcessorConfig
from deepinfer_ray.data.predictor import BatchPredictor
from deepinfer_ray.data.processor import Processor, build_processor

__all__ = ["BatchPredictor", "Processor", "ProcessorConfig", "build_processor"]
