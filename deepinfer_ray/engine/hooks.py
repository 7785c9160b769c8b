"""`EngineHooks`: the places of a step where a larger system attaches (spec/engine.md §11).

Knows: when each hook is called and what it may rely on. Does not know: what anybody does there; every hook
does nothing by default. Stores of caches, routers and the hand-over between roles (handover.py) subclass it.

Order within one step (spec/engine.md §7.2): schedule, copies of forks → `post_schedule` → [decode:
`should_copy_state`, `do_copy_state`] → forward launched → the step before is committed → sampling launched →
`finalize_seq` of each finished sequence → `do_save_kvcache` or `pe_prepare_save_kvcache` → memory freed → a
prompt step is committed: `pe_do_save_kvcache`, role `prompt`: `send_processed_prompts`.
Hooks run on the step loop's thread. All cache writes of launched steps are ordered before copies that a hook
enqueues on the same stream; a hook that reads bytes on the host waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_ray.engine.plan import NO_ROWS, CommitResult, StepPlan
from deepinfer_ray.engine.sequence import Sequence, Terminal

if TYPE_CHECKING:
    from deepinfer_ray.engine.engine import Engine
    from deepinfer_ray.engine.scheduler import Scheduler


class EngineHooks:
    """Every hook with its default: nothing."""

    def init_pd_split(self, engine: Engine) -> None:
        """Once, after the caches exist and before the first request, for roles `prompt` and `completion`."""

    def post_schedule(self, plan: StepPlan) -> None:
        """After every schedule, copies of forks and kept prefixes enqueued, before the forward."""

    def should_copy_state(self, plan: StepPlan) -> np.ndarray:
        """int64 [m]: indices into a decode step's plan whose state slots are wanted as they are before it."""
        return NO_ROWS

    def do_copy_state(self, plan: StepPlan, indices: np.ndarray) -> None:
        """Copies the slots `plan.rows[indices]`; called before the forward when there are any."""

    def finalize_seq(self, sequence: Sequence) -> None:
        """A sequence ended; its row and blocks are still its own and are freed right after."""

    def do_save_kvcache(self, plan: StepPlan) -> None:
        """After the sampling of a decode step is launched; `plan.finished` are the sequences that ended."""

    def pe_prepare_save_kvcache(self, plan: StepPlan) -> None:
        """After the sampling of a prompt step is launched: its cache entries are ordered before what is
        enqueued here."""

    def pe_do_save_kvcache(self, plan: StepPlan) -> None:
        """A prompt step is committed."""

    def send_processed_prompts(self, plan: StepPlan) -> None:
        """Role `prompt`, a prompt step is committed: sequences of `plan` whose prompt is complete have their
        first token. Those that go to another engine leave by `Scheduler.release_processed`; their memory is
        free after this call."""

    def process_output(self, terminals: list[Terminal]) -> None:
        """Records that came out of a flush."""

    def post_process_model_outputs(self, plan: StepPlan, result: CommitResult) -> None:
        """At the end of every commit, before statistics."""

    def get_num_pendings(self, scheduler: Scheduler) -> int:
        """The load that a router should see: requests that do not run yet."""
        return scheduler.num_waiting

    def build_extra_metrics_log(self) -> dict[str, Any]:
        """Further JSON-able statistics of the engine."""
        return {}
