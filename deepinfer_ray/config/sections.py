"""The option blocks of the engine with their defaults (spec/engine.md §17).

Knows: names, ranges, rules within a block. Does not know: rules between blocks (`engine.py`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from deepinfer_ray.config.base import Section
from deepinfer_ray.config.topology import BLOCK_TOKENS

UNLIMITED_SUM_K = 1 << 30
MAX_DRAFTS = 32
"""Most drafts of a step (spec/speculative.md §0.1)."""
MAX_FORCE_TOPK = 16384
"""Most candidates that `sampling.force_topk` may keep (spec/speculative.md §5.7)."""


class ModelOptions(Section):
    """Which checkpoint, and how it is read."""

    path: str | None = None
    tokenizer_path: str | None = None
    """Directory of the tokenizer; None = the checkpoint's."""
    trust_remote_code: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` = random weights of the right shapes, nothing is read."""
    revision: str | None = None
    tokenizer_revision: str | None = None
    index_memory_bytes: int = Field(10 * 2**30, ge=1)
    """Bound of the index scores that exist at one time."""
    engram_on_gpu: bool = False


class ParallelOptions(Section):
    """Sizes of the rank groups (spec/distributed.md)."""

    dp: int = Field(0, ge=0)
    """Replicas of the data-parallel group; 0 = max(1, ep // cp)."""
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    engram: int = Field(0, ge=0)
    """Ranks that share one copy of the Engram tables; 0 = dp * cp."""
    nccl_ctas: int = Field(32, ge=1)
    timeout_s: float = Field(600.0, gt=0)
    step_timeout_s: float = Field(300.0, gt=0)
    label_selector: tuple[str, ...] = ()
    """Node labels of machines that may hold a rank, each as `name=value`; the value may also be `!value`,
    `in(a,b)` or `!in(a,b)`."""

    @property
    def replicas(self) -> int:
        return self.dp or max(1, self.ep // self.cp)

    @property
    def engram_size(self) -> int:
        return self.engram or self.replicas * self.cp

    @property
    def world(self) -> int:
        return max(self.replicas * self.cp, self.engram_size)

    @property
    def labels(self) -> dict[str, str]:
        """`label_selector` by name."""
        return {name: wish for name, _, wish in (entry.partition("=") for entry in self.label_selector)}

    @field_validator("label_selector")
    @classmethod
    def _named(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            name, equals, wish = entry.partition("=")
            if not (name and equals and wish):
                raise ValueError(f"{entry!r} is no label; write name=value, as ray.io/accelerator-type=H200")
        return entries

    @model_validator(mode="after")
    def _divisible(self) -> ParallelOptions:
        ranks = self.replicas * self.cp
        if ranks % self.ep:
            raise ValueError(
                f"dp * cp = {self.replicas} * {self.cp} = {ranks} is not divisible by ep = {self.ep}"
            )
        if self.world % ranks:
            raise ValueError(
                f"world = max(dp * cp, engram) = {self.world} is not divisible by dp * cp = {ranks}"
            )
        if self.world % self.engram_size:
            raise ValueError(f"world = {self.world} is not divisible by engram = {self.engram_size}")
        return self


class CacheOptions(Section):
    """Blocks and state slots (spec/engine.md §6, §10)."""

    memory_utilization: float = Field(0.9, gt=0, le=1)
    block_size: Literal[128] = 128
    """Tokens of a block; fixed."""
    max_backtracking: int | None = Field(None, ge=0)
    """Rollback depth of the rings; the effective value is max(this, num_drafts + 1)."""
    state_slots_ratio: float = Field(1.2, ge=1)
    store_extra_state: bool = False
    store_extra_tokens: int = Field(128, ge=0)
    prefix_reuse: bool = True
    """Keep the cache of token prefixes that waiting requests share, and start requests from it."""
    prefix_budget_fraction: float = Field(0.25, ge=0, le=0.9)
    """Most that kept prefixes may hold: of the blocks, given back when a sequence needs them, and of the
    bytes beside the state slots, set aside for copies of their window rings."""
    prefix_min_saved_tokens: int = Field(256, ge=1)
    """A prefix is kept for the waiting requests that it spares this many tokens together: keeping one may
    cost a step of its own."""
    graph_reserve_bytes: int = Field(0, ge=0)
    num_blocks_override: int | None = Field(None, ge=2)
    """Blocks instead of the number that the memory budget gives; block 0 belongs to nobody."""
    cpu_budget_bytes: int = Field(2 * 2**30, ge=1)
    """Bytes for blocks and state slots of one rank on the CPU backend."""


class SchedulerOptions(Section):
    """Admission, chunks and phases (spec/engine.md §3–5)."""

    max_model_len: int | None = Field(None, ge=2)
    """Prompt and output tokens of one sequence; None = 4096, or the model's limit if that is less."""
    max_batched_tokens: int | None = Field(None, ge=BLOCK_TOKENS)
    """Rows of one step; None = max(max_model_len, 4096, max_seqs * (1 + num_drafts))."""
    max_seqs: int = Field(256, ge=1)
    preemption: Literal["stop", "recompute"] = "recompute"
    role: Literal["normal", "prompt", "completion"] = "normal"
    chunked_prefill: bool = True
    min_chunk_tokens: int = Field(0, ge=0)
    prefill_max_sum_k: int = Field(UNLIMITED_SUM_K, ge=1)
    # 16/16 carried 13–21 % more tokens a second than the original 70/100 (bench/results/policy.json).
    prefill_all_interval: int = Field(16, ge=1)
    prefill_any_interval: int = Field(16, ge=1)
    zos: bool | None = None
    """Overlapped steps; None = on unless the role is `prompt`."""
    idle_fast_path: bool = True
    strict_block_headroom: bool = False
    """Demand a free block before every sequence of a decode step, needed or not (the original's rule)."""

    @property
    def overlapped(self) -> bool:
        return self.role != "prompt" if self.zos is None else self.zos


class PrefillOptions(Section):
    """Bounded replay of the consumer layers (spec/attention.md §13)."""

    truncation_mode: Literal["off", "mask", "compact"] = "off"
    keep_tokens: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _keep_is_set(self) -> PrefillOptions:
        if self.truncation_mode != "off" and self.keep_tokens == 0:
            raise ValueError(f"truncation_mode = '{self.truncation_mode}' needs keep_tokens, e.g. 140")
        return self


class SpeculativeOptions(Section):
    """Drafting and verification (spec/speculative.md)."""

    num_drafts: int | None = Field(None, ge=0)
    """Draft tokens a step, at most 32; 0 = plain decoding. Greedy output is the same with and without drafts,
    sampled output has the same distribution. More than the checkpoint's `dspark_block_size` work, but were
    never trained. None: 5 where `runtime.backend` is `cuda` and the checkpoint has draft layers, else 0
    (`auto` too: what comes out must not depend on the machine that a job is started from)."""
    varlen: bool = False
    """Verify as many drafts as are worth their measured time. Lengths then depend on timing, and with them
    the draws of sampled rows (not their distribution)."""
    confidence_temperature: float | tuple[float, ...] = 1.0
    """One temperature, or one for each draft position."""
    enforce_eager: bool = False
    graph_interval: int = Field(8, ge=1)
    """These two of the release change nothing here: drafting is always launched eagerly."""
    perf_cache_dir: str | None = None
    """Directory in which measured costs of decode steps are kept."""
    perf_cache_ttl_s: int = Field(3600, ge=0)

    @field_validator("num_drafts")
    @classmethod
    def _few_drafts(cls, value: int | None) -> int | None:
        if value is not None and value > MAX_DRAFTS:
            raise ValueError(
                f"num_drafts = {value} is more than {MAX_DRAFTS}, the longest block that can be drafted; "
                "checkpoints are trained for fewer (dspark_block_size, 5 in V4.1)"
            )
        return value

    @model_validator(mode="after")
    def _temperatures(self) -> SpeculativeOptions:
        value = self.confidence_temperature
        values = value if isinstance(value, tuple) else (value,)
        if any(temperature <= 0 for temperature in values):
            raise ValueError(f"confidence_temperature = {list(values)} must be positive")
        if isinstance(value, tuple) and len(value) != (self.num_drafts or 0):
            raise ValueError(
                f"confidence_temperature has {len(value)} values, needs one or num_drafts = "
                f"{self.num_drafts or 0}"
            )
        return self


class SamplingOptions(Section):
    """Sampler settings of a whole engine; a row's own are `SamplingParams`."""

    diagnostics: bool = False
    """Give every token of a result how it came about (`RequestResult.diagnostics`)."""
    force_topk: int = Field(0, ge=0, le=MAX_FORCE_TOPK)
    """Only this many of a row's best logits take part in anything, log-probabilities too; 0 = all."""
    token_blacklist: str = Field("", coerce_numbers_to_str=True)
    """Ids and inclusive ranges that are never sampled, strictly increasing: `0..3,7`."""

    @field_validator("token_blacklist")
    @classmethod
    def _blacklist_parses(cls, value: str) -> str:
        parse_token_blacklist(value)
        return value

    @property
    def blacklisted_ids(self) -> tuple[int, ...]:
        return parse_token_blacklist(self.token_blacklist)


def parse_token_blacklist(text: str) -> tuple[int, ...]:
    """Ids of `0..3,7`; `ValueError` unless the parts are strictly increasing."""
    ids: list[int] = []
    for part in (piece.strip() for piece in text.split(",")) if text.strip() else ():
        first, dots, last = part.partition("..")
        try:
            start = int(first)
            stop = int(last) if dots else start
        except ValueError:
            raise ValueError(f"'{part}' is neither a token id nor a range such as 0..3") from None
        if start < 0 or stop < start or (ids and start <= ids[-1]):
            raise ValueError(f"'{part}' breaks the strictly increasing order of ids")
        ids.extend(range(start, stop + 1))
    return tuple(ids)


class StructuredOptions(Section):
    """Grammar compilation."""

    debug: bool = False
    timeout_s: float = Field(20.0, gt=0)
    disable_cache: bool = False
    cache_bytes: int = Field(10 * 2**30, ge=0)
    threads: int = Field(4, ge=1)
    """Grammars that are compiled at the same time, each in a process of its own."""
    memory_mb: int = Field(4096, ge=64)
    """Memory one of these processes may use for its grammar."""
    max_schema_bytes: int = Field(256 * 1024, ge=1)
    max_nesting: int = Field(64, ge=1, le=200)
    """Levels of schemas within schemas, and of values in them."""
    max_whitespace: int = Field(100, ge=1)
    """Spaces and newlines in a row between the parts of JSON, more or less the length of a token."""
    on_preempt: Literal["finish", "replay"] = "replay"
    """A row that loses its cache: end it with what it has, or compute it again to the same end."""


class MultimodalOptions(Section):
    """The image path's buffers."""

    use_pool: bool | None = None
    """Pinned pool for image tensors; None = on unless the role is `completion`."""
    pool_gb: float = Field(8.0, gt=0)
    queue_size: int = Field(512, ge=1)
    timeout_s: float = 1800.0
    """No progress with pending images for this long is a failure; 0 or less = never."""


class MoeOptions(Section):
    """Expert exchange."""

    transport: Literal["auto", "torch", "deep_ep"] = "auto"
    """What carries rows between expert ranks: torch.distributed, or DeepEP; auto = DeepEP where its package
    is installed and the device can use it. DeepEP's sums differ in low bits."""
    comm_sms: int = Field(0, ge=0)
    """Multiprocessors of the exchange kernels; 0 = automatic."""


class EplbOptions(Section):
    """Expert load balancing (spec/distributed.md §4)."""

    p2p_groups: int = Field(1, ge=1)
    extra_experts: int = Field(0, ge=0)
    window: int = Field(100, ge=1)
    interval: int = Field(0, ge=0)
    """Steps between rearrangements; 0 = off."""
    after_prefill: bool = False
    stat_interval: int = Field(128, ge=1)
    verbose: bool = False
    verify: bool = False
    """Hash every expert slot after loading and after each rearrangement (reads all weights; for tests)."""

    @model_validator(mode="after")
    def _window_fits(self) -> EplbOptions:
        if self.interval and self.window > self.interval:
            raise ValueError(f"window = {self.window} must not exceed interval = {self.interval}")
        return self


class RuntimeOptions(Section):
    """Process and device."""

    backend: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    """Seeds torch and numpy; sampling has its own seeds."""
    jit_cache_dir: str | None = None
    enforce_eager: bool = False
    graph_interval: int = Field(8, ge=1)
    gc_interval: int = Field(1000, ge=1)
    batch_invariant: bool = False
    """On a device: all steps of a kind have one number of rows, so that a row's bits do not depend on how
    many others there are. Small steps then cost as much as full ones. On a CPU this holds anyway."""


class ProfileHttpOptions(Section):
    """The profiling endpoint (spec/engine.md §12)."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port_base: int = Field(6070, ge=1, le=65535)
    output_dir: str | None = None


class ObservabilityOptions(Section):
    """Logs and statistics."""

    log_stats: bool = True
    log_interval: int = 100
    """Steps between log lines; 0 or less = never."""
    nccl_mem_interval: int = Field(1000, ge=1)
    profile_http: ProfileHttpOptions = ProfileHttpOptions()
    log_level: Literal["off", "error", "warn", "info", "debug"] = "info"


class DebugOptions(Section):
    """Switches for experiments."""

    force_imbalance: float = Field(0.0, ge=0)
    force_balance: bool = False
    disable_sync_guard: bool = False
    cuda_memory_history: str | None = None
    memory_tracing: bool = False
