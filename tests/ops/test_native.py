"""Native code against the tensor operations it stands for: the same bits, whatever the shapes."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from deepinfer_ray.ops import formats, hyper_connections, index, moe, native, norm, rope
from deepinfer_ray.ops.native import build
from deepinfer_ray.ops.numerics import Numerics

ROWS = [0, 1, 2, 3, 7, 16, 17, 33, 70]


@pytest.fixture(autouse=True)
def library():
    """Native code loaded; skipping would hide a broken build where a compiler is there."""
    if not native.load():
        assert build.find_compiler() is None
        pytest.skip("no C compiler")


@pytest.fixture
def both(monkeypatch):
    """`both(f)`: the results of f with native code and without."""

    def run(function):
        with torch.inference_mode():
            fused = function()
            with monkeypatch.context() as patch:
                patch.setattr(native, "_library", None)
                plain = function()
        return fused, plain

    return run


def _equal(pair):
    fused, plain = pair
    if isinstance(fused, tuple):
        return all(_equal(parts) for parts in zip(fused, plain, strict=True))
    return fused.shape == plain.shape and torch.equal(
        torch.nan_to_num(fused, nan=1.25e30), torch.nan_to_num(plain, nan=1.25e30)
    )


def _values(*shape, seed=0):
    """Numbers over many magnitudes, with zeros, both signs of zero, ties and rare large values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))
    x[rng.random(shape) < 0.05] = 0.0
    x[rng.random(shape) < 0.02] = -0.0
    x[rng.random(shape) < 0.05] = 448.0
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("rows", ROWS)
def test_rounding_and_fake_quantization(both, rows):
    x = _values(rows, 96)
    assert _equal(both(lambda: formats.bf16_round(x)))
    assert _equal(both(lambda: formats.fake_quant_fp8(x)))
    assert _equal(both(lambda: formats.fake_quant_fp8(formats.bf16_round(x))))
    assert _equal(both(lambda: formats.fake_quant_index(x)))
    assert _equal(both(lambda: formats.fake_quant_index(formats.bf16_round(x).view(rows, 3, 32))))
    assert _equal(both(lambda: formats.bf16_round(x.view(rows, 3, 32).transpose(0, 1))))


def test_rounding_keeps_nan_and_infinity(both):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 3.39e38, -3.4e38, 1e-45, -1e-40])
    assert _equal(both(lambda: formats.bf16_round(x)))


@pytest.mark.parametrize("mode", ["exact", "released"])
@pytest.mark.parametrize("rows", ROWS)
def test_norm(both, mode, rows):
    nx, x, weight = Numerics(mode), _values(rows, 160), torch.rand(96)
    assert _equal(both(lambda: norm.rounded_rms_norm(x[:, :96], weight, 1e-20, nx)))
    assert _equal(both(lambda: norm.rounded_rms_norm(x[:, 64:], weight, 1e-20, nx)))


@pytest.mark.parametrize("rows", ROWS[1:])
def test_hyper_connection(both, rows):
    torch.manual_seed(rows)
    x, fn, scale, base = torch.randn(rows, 4, 64), torch.randn(24, 256), torch.rand(24), torch.randn(24)
    assert _equal(both(lambda: hyper_connections.mix(x, fn, scale, base, 1e-20, 1e-6, 20)))
    x, fn, scale, base = torch.randn(rows, 2, 64), torch.randn(8, 128), torch.rand(8), torch.randn(8)
    assert _equal(both(lambda: hyper_connections.mix(x, fn, scale, base, 1e-20, 1e-6, 3)))


@pytest.mark.parametrize("mode", ["exact", "released"])
@pytest.mark.parametrize("rows", ROWS)
def test_rotation(both, mode, rows):
    nx, table = Numerics(mode), rope.RopeTable(rope.inverse_frequencies(16, 10000.0), 500)
    cos, sin = table.take(torch.arange(rows) * 5)
    x = torch.randn(rows, 3, 40)
    assert _equal(both(lambda: rope.rotate_tail(x.clone(), cos.unsqueeze(1), sin.unsqueeze(1), nx)))
    assert _equal(both(lambda: rope.rotate_tail(x[:, 0].clone(), cos, sin, nx)))

    def in_a_slice():
        wide = torch.cat((x.view(rows, 120), x.view(rows, 120)), dim=1)
        rope.rotate_tail(wide[:, 120:].view(rows, 3, 40), cos.unsqueeze(1), sin.unsqueeze(1), nx)
        return wide

    assert _equal(both(in_a_slice))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("experts", [4, 9, 384])
def test_router(both, rows, experts):
    torch.manual_seed(rows)
    logits = (torch.randn(rows, experts) * 8).round(decimals=1)
    logits[:, :2] = 25.0
    for k in (1, 3):
        assert _equal(both(lambda k=k: moe.route(logits, torch.zeros(experts), k, 1.5)))


@pytest.mark.parametrize("mode", ["exact", "released"])
@pytest.mark.parametrize("rows", ROWS)
def test_combine(both, mode, rows):
    o = _values(rows, 4, 33)
    assert _equal(both(lambda: moe.rounded_combine(o, Numerics(mode))))


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("rows", ROWS[1:])
def test_index_scores_and_selection(both, heads, rows):
    torch.manual_seed(rows)
    q, w, keys = torch.randn(rows, heads, 32), torch.randn(rows, heads), torch.randn(rows, 75, 32)
    fused, plain = both(lambda: index.index_scores(q, w, keys))
    assert torch.equal(fused, plain)
    scores = (fused * 2).round() / 2  # many ties, zeros of both signs
    klen = torch.randint(0, 76, (rows,))
    for k in (1, 8, 64, 100):
        assert _equal(both(lambda k=k: index.select_visible(scores, klen, k)))
    for k, size in ((3, 4), (10, 8), (40, 2)):
        assert _equal(both(lambda k=k, s=size: index.candidate_blocks(scores, klen, k, s)))


def test_window_records(both):
    x = _values(40, 96, seed=3)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(64)[:40])

    def store_and_load():
        view = torch.zeros(64, 99, dtype=torch.uint8)
        if native._library is None:
            codes, scales = formats.quantize_fp8_groups(x)
            view.index_copy_(0, rows, torch.cat((codes, scales), 1))
            picked = view[torch.arange(64)]
            return view, formats.dequant_fp8_groups(picked[:, :96], picked[:, 96:])
        native.store_fp8(x, view, rows)
        return view, native.load_fp8(view, torch.arange(64), 96)

    assert _equal(both(store_and_load))


def test_every_fp8_code_and_scale_is_read_as_by_the_tensors():
    view = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for scale in (0, 1, 105, 127, 200, 255):
        records = torch.cat((view, torch.full((8, 1), scale, dtype=torch.uint8)), dim=1)
        got = native.load_fp8(records, torch.arange(8), 32)
        want = formats.dequant_fp8_groups(records[:, :32], records[:, 32:])
        assert _equal((got, want)), scale


def test_fp4_records():
    rng = np.random.default_rng(1)
    codes = torch.from_numpy(rng.integers(0, 256, (50, 48), dtype=np.uint8))
    rows = torch.from_numpy(rng.integers(0, 50, 70))
    ue8m0 = torch.from_numpy(rng.choice([0, 1, 100, 127, 130, 255], (50, 3)).astype(np.uint8))
    got = native.load_fp4(codes, rows, ue8m0, rows, 96, 32, None)
    assert _equal((got, formats.dequant_index(codes[rows], ue8m0[rows])))
    e4m3 = torch.from_numpy(rng.integers(0, 127, (50, 6), dtype=np.uint8))
    got = native.load_fp4(codes, rows, e4m3, rows, 96, 16, formats.e4m3_values(codes.device))
    assert _equal((got, formats.dequant_kv(codes[rows], e4m3[rows])))


@pytest.mark.parametrize("rounded", [False, True])
def test_stored_fp4_records(rounded):
    x = _values(60, 96, seed=5)
    x = formats.bf16_round(x) if rounded else x
    rows = torch.from_numpy(np.random.default_rng(2).permutation(80)[:60])
    codes, scales = torch.zeros(80, 48, dtype=torch.uint8), torch.zeros(80, 3, dtype=torch.uint8)
    native.store_fp4(x, codes, rows, scales, rows, 32, None)
    want_codes, want_scales = formats.quantize_index(x)
    assert torch.equal(codes[rows], want_codes)
    assert torch.equal(scales[rows], want_scales)
    table = formats.e4m3_values(x.device)
    for divide in (False, True):
        codes, scales = torch.zeros(80, 48, dtype=torch.uint8), torch.zeros(80, 6, dtype=torch.uint8)
        native.store_fp4(x, codes, rows, scales, rows, 16, table, divide)
        want_codes, want_scales = formats.quantize_kv(x, divide=divide)
        assert torch.equal(codes[rows], want_codes)
        assert torch.equal(scales[rows], want_scales)


def test_native_code_stays_out_of_graphs():
    x = torch.randn(2, 32, requires_grad=True)
    assert not native.ready(x)
    with torch.no_grad():
        assert native.ready(x)
    formats.fake_quant_fp8(x).sum().backward()
    assert x.grad.eq(1).all()


# Building ---------------------------------------------------------------------------------------------------


def test_a_library_is_built_once_for_each_source(tmp_path, monkeypatch):
    first = build.build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    changed = tmp_path / "kernels.c"
    changed.write_text(build.SOURCE.read_text() + "\n/* another */\n")
    monkeypatch.setattr(build, "SOURCE", changed)
    assert build.build(tmp_path) != first
    assert len(list(tmp_path.glob("*.so"))) == 2


def test_without_a_compiler_there_is_no_library(monkeypatch, caplog):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with caplog.at_level("INFO"):
        assert build.load() is None
    assert "no C compiler (cc, gcc, clang or $CC) on the path" in caplog.text


def test_a_failing_compiler_is_reported_and_survived(monkeypatch, caplog, tmp_path):
    source = tmp_path / "kernels.c"
    source.write_text("this is not C")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level("INFO"):
        assert build.load() is None
    assert "run as tensor operations, not as native code" in caplog.text
    with pytest.raises(subprocess.CalledProcessError):
        build.build(tmp_path)
    assert not list(tmp_path.rglob("*.so"))


def test_the_switch_keeps_native_code_off(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.load() is None
