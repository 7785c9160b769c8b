"""The shipped cluster file against Ray's own schema and its own preparation step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIG = Path(__file__).parents[2] / "configs" / "cluster" / "local.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    return loaded


def test_schema_accepts_it(config: dict[str, Any]) -> None:
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**config, "no_such_key": 1}, schema)


def test_ray_prepares_it(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config["provider"]["worker_ips"] = ["10.0.0.2", "10.0.0.3"]
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == 2


def test_workers_name_their_domain(config: dict[str, Any]) -> None:
    from deepinfer_ray.fleet.topology import GPU_DOMAIN_LABEL

    assert any(GPU_DOMAIN_LABEL in command for command in config["worker_start_ray_commands"])
    assert not any(GPU_DOMAIN_LABEL in command for command in config["head_start_ray_commands"])
