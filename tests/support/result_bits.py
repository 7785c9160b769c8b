"""What of a result must be the same bit for bit, whoever else was in the batch."""

from __future__ import annotations

from deepinfer_ray.engine.request import RequestResult

Bits = tuple[list[int], list[float] | None, list[float] | None, object, str, str]


def bits_of(result: RequestResult) -> Bits:
    """Token ids, log-probabilities of completion and prompt, alternatives, finish reason, text."""
    return (
        result.token_ids.tolist(),
        None if result.logprobs is None else result.logprobs.tolist(),
        None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
        result.top_logprobs,
        result.finish_reason,
        result.text,
    )
