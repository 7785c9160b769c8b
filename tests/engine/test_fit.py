"""The fit table against spec/model.md §5, and what a person hears when nothing fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine.fit import GIB, GPUS, Gpu, fit_problem, fit_table

RELEASED = Path(__file__).parents[2] / "configs/models/deepseek-v4.1-flash"

WEIGHTS_AND_ENGRAM_GIB = {
    1: ("286.62", "188.83"),
    2: ("148.78", "94.42"),
    4: ("79.86", "47.21"),
    8: ("45.41", "23.60"),
    16: ("28.18", "11.80"),
    32: ("19.56", "5.90"),
    48: ("16.71", "3.93"),
    64: ("15.25", "2.95"),
}
"""Columns "GPU sum" and "Engram share" of spec/model.md §5."""


@pytest.fixture(scope="module")
def model():
    return ModelConfig.load(RELEASED)


def table(released, gpus=GPUS, **options):
    return fit_table(released, EngineConfig().with_values(**options).resolve(released), gpus)


def test_the_released_model_matches_the_accounting(model):
    fits = table(model)
    for kind in GPUS:
        rows = {fit.ep: fit for fit in fits if fit.gpu == kind}
        shown = {
            ep: (f"{fit.weights_bytes / GIB:.2f}", f"{fit.engram_bytes / GIB:.2f}")
            for ep, fit in rows.items()
        }
        assert shown == WEIGHTS_AND_ENGRAM_GIB


def test_what_fits_where(model):
    least = {kind.name: min(fit.ep for fit in table(model) if fit.gpu == kind and fit.fits) for kind in GPUS}
    assert least == {"H100": 8, "H200": 4, "B200": 2}
    for fit in table(model):
        assert fit.fits == (fit.num_blocks > 0 and fit.num_slots > 0)
        assert fit.left_bytes == int(fit.gpu.memory_bytes * 0.9) - fit.weights_bytes


def test_nothing_fits_at_the_asked_size(model):
    fits = table(model)
    assert fit_problem(fits, 8) is None
    assert fit_problem(fits, 2) is None
    assert fit_problem(fits, 1) == (
        "EP 1 fits on none of H100, H200, B200: on B200 weights of a rank take 286.62 GiB, 90% of the device "
        "are 150.87 GiB. The least EP that fits is 8 on H100, 4 on H200, 2 on B200; raise --ep"
    )


def test_nothing_fits_at_any_size(model):
    small = (Gpu("small", 16 * 10**9),)
    message = fit_problem(table(model, small), 64)
    assert message.startswith(
        "EP 64 fits on none of small: on small weights of a rank take 15.25 GiB, 90% of"
    )
    assert message.endswith(
        "No EP size fits either; lower --max-num-seqs or --max-model-len if caches are what is missing"
    )


def test_caches_that_do_not_fit_say_so(model):
    fits = table(model, (Gpu("tight", 56 * 10**9),), scheduler={"max_seqs": 4096})
    (eight,) = [fit for fit in fits if fit.ep == 8]
    assert not eight.fits
    assert "GiB are left for caches, but the cache budget of" in eight.problem
    assert "lower scheduler.max_seqs = 4096" in eight.problem


def test_engram_tables_on_the_device_count(model):
    on_host, on_gpu = table(model), table(model, model={"engram_on_gpu": True})
    for host, gpu in zip(on_host, on_gpu, strict=True):
        assert gpu.weights_bytes == host.weights_bytes + host.engram_bytes
