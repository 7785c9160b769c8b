"""`LLM`: lists of prompts in, one result each out, in one process or over a fleet.

Knows: the offline API (spec/engine.md §1.1) and how prompts become requests. Does not know: steps, ranks.
Stands above engine and fleet; the fleet is imported only for more than one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import ValidationError

from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.load import from_options
from deepinfer_ray.engine.build import build_engine, prepare
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import (
    Request,
    RequestResult,
    SamplingParams,
    as_token_ids,
    completion_seed,
    describe_validation,
)
from deepinfer_ray.errors import DeepInferError, RowError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenIds = Sequence[int] | np.ndarray
Params = SamplingParams | Mapping[str, Any]


class Runner(Protocol):
    """Where requests run: this process or a fleet."""

    def run(self, requests: Sequence[Request]) -> list[RequestResult]:
        """One result a request, in input order."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _InProcess:
    """One rank in this process, without Ray."""

    engine: Engine

    def run(self, requests: Sequence[Request]) -> list[RequestResult]:
        place = {request.request_id: index for index, request in enumerate(requests)}
        for request in requests:
            self.engine.add(request)
        results: list[RequestResult | None] = [None] * len(requests)
        try:
            for result in self.engine.run():
                results[place[result.request_id]] = result
        except KeyboardInterrupt:
            for request in requests:
                self.engine.abort(request.request_id)
            self.engine.run()
            raise
        return [result for result in results if result is not None]

    def close(self) -> None:
        self.engine.close()


class LLM:
    """Offline inference over a checkpoint directory.

    `dp * cp * ep == 1` runs in this process; otherwise a fleet is started through Ray and gives the same
    results. Engine options by keyword: short names (`max_num_seqs`), dotted keys through a mapping of their
    block (`scheduler={"max_seqs": 4}`); an unknown one is a `ConfigError` with the nearest valid name.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        numerics: Literal["exact", "released"] = "released",
        device: str | None = None,
        dp: int = 1,
        cp: int = 1,
        ep: int = 1,
        **engine_options: Any,
    ) -> None:
        """Loads the model. `ConfigError`, `CheckpointError`, `PlacementError` before anything runs."""
        options = {"numerics": numerics, "dp": dp, "cp": cp, "ep": ep, **engine_options}
        if device is not None:
            options["runtime.backend"] = device.partition(":")[0]
        self.config = from_options(EngineConfig, options)
        self.model_dir = Path(model)
        self._runner: Runner | None = None
        self._counter = 0
        if max(dp, cp, ep) == 1:
            engine = build_engine(self.model_dir, self.config, device)
            self.config, self.model_config = engine.config, engine.model.config
            self.defaults = GenerationDefaults.load(self.model_dir)
            self._runner = _InProcess(engine)
        else:
            parts = prepare(self.model_dir, self.config, "cpu")  # refuse here what every rank would refuse
            self.model_config, self.defaults = parts.model_config, parts.defaults
            from deepinfer_ray.fleet.generate import FleetGenerator

            self._runner = FleetGenerator(self.model_dir, self.config, dp=dp, device=device or "auto")
        where = self.config.model.tokenizer_path or self.model_dir
        self._text = TextEncoder.load(where, bos_id=self.model_config.bos_token_id)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._text.tokenizer_json)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        prompt_token_ids: Sequence[TokenIds] | None = None,
    ) -> list[RequestResult]:
        """One result for each prompt, in input order; what failed is a result with `error` and `error_code`.

        prompts: texts; each gets one BOS in front. prompt_token_ids: ids as they are; they win when both are
        given. sampling_params: one for all or one each; None = the checkpoint's defaults. With `n > 1` a
        result is its first completion and `.completions` lists all n. Without a seed of its own, prompt
        number i of this object is sampled with a seed derived from the option `seed` and i.
        Raises `ValueError` for lists that do not fit together.
        """
        if self._runner is None:
            raise DeepInferError("this LLM is closed")
        if prompts is None and prompt_token_ids is None:
            raise ValueError("give prompts or prompt_token_ids")
        if isinstance(prompts, Mapping):
            raise ValueError("prompts is a mapping; give a text or a list of texts")
        texts = [prompts] if isinstance(prompts, str) else prompts
        count = len(prompt_token_ids if prompt_token_ids is not None else texts or ())
        if texts is not None and len(texts) != count:
            raise ValueError(f"{len(texts)} prompts, but {count} prompt_token_ids")
        params = self._params(sampling_params, count)
        results: list[list[RequestResult]] = [[] for _ in range(count)]
        requests: list[Request] = []
        owners: list[int] = []
        for index in range(count):
            number, self._counter = self._counter, self._counter + 1
            try:
                if prompt_token_ids is not None:
                    ids = as_token_ids(prompt_token_ids[index], self.model_config.text.vocab_size)
                else:
                    assert texts is not None
                    ids = self._text.encode_prompt(texts[index])
            except RowError as error:
                failed = RequestResult.failed(-1, 0, error.code, str(error))
                results[index] = [dataclasses.replace(failed) for _ in range(params[index].n)]
                continue
            for completion in range(params[index].n):
                seed = completion_seed(self.config.runtime.seed, str(number), params[index].seed, completion)
                requests.append(Request(ids, params[index], seed))
                owners.append(index)
        for owner, result in zip(owners, self._runner.run(requests), strict=True):
            results[owner].append(result)
        return [_first_of(completions) for completions in results]

    def _params(self, given: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams | Mapping):
            return [self._one(given)] * count
        if len(given) != count:
            raise ValueError(f"{count} prompts, but {len(given)} sampling_params")
        return [self._one(each) for each in given]

    def _one(self, given: Params | None) -> SamplingParams:
        if isinstance(given, SamplingParams):
            return given
        values = {name: value for name, value in (given or {}).items() if value is not None}
        try:
            return self.defaults.params(**values)
        except ValidationError as error:
            raise ValueError(describe_validation(error)) from None

    @property
    def stats(self) -> dict[str, Any]:
        """What the engine, or the fleet, says of itself."""
        if isinstance(self._runner, _InProcess):
            return self._runner.engine.stats
        return {} if self._runner is None else self._runner.status()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Ends ranks and frees the model; may be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_of(completions: list[RequestResult]) -> RequestResult:
    first = completions[0]
    first.completions = completions
    return first
