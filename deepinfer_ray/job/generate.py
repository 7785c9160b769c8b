"""One `generate` from its configuration to its summary: prepare, resume or start, run, sum up.

Knows: the order of the steps and what a resumed run compares. Does not know: how a backend runs rows, what a
command line looks like. Everything that can be refused is refused before a backend is made.
"""

from __future__ import annotations

import datetime
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_ray import __version__
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.job import RunConfig
from deepinfer_ray.errors import DeepInferError, OutputError, PlacementError, RankFailure
from deepinfer_ray.fleet.backend import Backend
from deepinfer_ray.job.commits import Commits
from deepinfer_ray.job.encode import Encoder
from deepinfer_ray.job.feeder import Feeder
from deepinfer_ray.job.ids import check_ids
from deepinfer_ray.job.lease import Lease
from deepinfer_ray.job.ledger import (
    CONFIG,
    QUARANTINE,
    SUMMARY,
    Ledger,
    build_manifest,
    digest,
    model_fingerprint,
    planned_rows_per_part,
)
from deepinfer_ray.job.observe import Observer
from deepinfer_ray.job.openai_results import ERRORS, RESULTS, result_files
from deepinfer_ray.job.plan import InputPlan, Part
from deepinfer_ray.job.prepare import Prepared, Say, prepare
from deepinfer_ray.job.progress import Progress
from deepinfer_ray.job.report_file import leave_report
from deepinfer_ray.job.runner import Ending, Runner
from deepinfer_ray.job.schema import kept_columns
from deepinfer_ray.job.signals import StopNow, StopSignals
from deepinfer_ray.job.sink import Counts, KeptOutcome, PartWriter
from deepinfer_ray.job.stats_file import StatsFile
from deepinfer_ray.job.store import Store
from deepinfer_ray.job.summary import Summary

QUEUE_ROWS = 1024
"""Encoded rows that wait for the backend at most."""

BackendFactory = Callable[[EngineConfig, ModelConfig], Backend]
"""Resolved engine configuration and model → a backend that was not started."""


@dataclass(frozen=True)
class Outcome:
    """`exit_code` 0, 3, 4, 5, 130 or 143; `error`: what a person is told when it is 3, 4 or 5."""

    summary: Summary
    exit_code: int
    error: DeepInferError | None = None


def generate(config: RunConfig, make_backend: BackendFactory, say: Say, signals: StopSignals) -> Outcome:
    """Run a job. Raises `ConfigError`, `CheckpointError`, `InputError` before anything is started.

    `say` gets lines for a person (never a prompt). Errors of the run itself come back in the `Outcome`, so
    that its summary is printed.
    """
    prepared = prepare(config, say)
    store = Store(str(prepared.job.output))
    store.make()
    lease = Lease(store)
    lease.acquire()
    ledger = Ledger(store)
    try:
        return _run_leased(prepared, ledger, lease, make_backend, say, signals)
    finally:
        lease.release()
        ledger.close()


def _run_leased(
    prepared: Prepared,
    ledger: Ledger,
    lease: Lease,
    make_backend: BackendFactory,
    say: Say,
    signals: StopSignals,
) -> Outcome:
    stored = ledger.stored_manifest()
    plan = prepared.plan
    if stored is not None:
        plan = plan.with_rows_per_part(planned_rows_per_part(stored))
        ranges = [[file.rows_per_part for file in each.files] for each in (plan, prepared.plan)]
        if ranges[0] != ranges[1]:
            say("parts keep the rows of the first start; job.rows_per_part counts for a new output")
    if prepared.columns.id is not None and not _ids_checked(stored, plan, prepared.columns.id):
        check_ids(plan, prepared.columns.id)
    config = {**prepared.engine.model_dump(mode="json"), "job": prepared.job.model_dump(mode="json")}
    manifest = build_manifest(
        version=__version__,
        plan=plan,
        settings=prepared.settings(),
        config=config,
        model=model_fingerprint(prepared.model_dir),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    for change in ledger.open_manifest(manifest, prepared.job.allow_changed):
        say(f"changed since the output was begun, by your leave: {change}")
    ledger.write_json(CONFIG, config)
    say(f"the whole configuration is in {ledger.store.path(CONFIG)}")
    if ledger.removed_temporary:
        say(f"removed {ledger.removed_temporary} half-written files of an earlier run")
    outcome = _Run(prepared, plan, ledger, lease, manifest, say, signals).run(make_backend)
    if outcome.exit_code != 5:
        leave_report(ledger.store, outcome.summary.counts, say, hurried=signals.stopping)
    return outcome


def _ids_checked(stored: Mapping[str, Any] | None, plan: InputPlan, column: str) -> bool:
    """Whether the run that wrote the manifest looked at the same ids: it is written after that check."""
    return (
        stored is not None
        and stored.get("inputs") == [file.layout() for file in plan.files]
        and stored.get("rows") == plan.rows
        and stored.get("settings", {}).get("columns", {}).get("id") == column
    )


class _Run:
    """The part of a job that has an output directory."""

    def __init__(
        self,
        prepared: Prepared,
        plan: InputPlan,
        ledger: Ledger,
        lease: Lease,
        manifest: Mapping[str, Any],
        say: Say,
        signals: StopSignals,
    ) -> None:
        self._prepared = prepared
        self._plan = plan
        self._ledger = ledger
        self._lease = lease
        self._manifest = manifest
        self._say = say
        self._signals = signals
        self._started = time.monotonic()
        self._stopped_at_once = False
        done = ledger.done(plan)
        for name in ledger.foreign:
            say(f"{name} in the output is no part of this job and is left alone")
        counts = ledger.counts(done)
        if prepared.job.retry_errors:
            self._again = {name for name in done if counts[name].errors}
        else:
            self._again = set()
        self._done = done - self._again
        self._before = Counts()
        for name in self._done:
            self._before.add(counts[name])
        self._results = result_files(prepared, ledger.store, ledger.manifest)

    @property
    def rows_left(self) -> int:
        return self._plan.rows - self._before.rows

    def run(self, make_backend: BackendFactory) -> Outcome:
        if self._before.rows:
            self._say(f"resuming: {self._before.rows:,} rows are committed, {self.rows_left:,} rows left")
        if not self.rows_left:
            if not self._before.rows:
                self._say("the input has no rows: 0 rows left")
            return self._end(Counts(), 0)
        if self._results is not None:
            self._results.clear()
        prepared = self._prepared
        feeder = self._feeder(prepared.encoder())
        observer = self._observe()
        backend = make_backend(prepared.engine, prepared.model)
        ranks = prepared.engine.parallel.world
        more = f"; more may join, up to {prepared.job.max_gangs} gangs" if prepared.job.max_gangs else ""
        self._say(f"starting {ranks} rank{'s' if ranks > 1 else ''} for {self.rows_left:,} rows{more}")
        graceful = False
        try:
            feeder.start()  # the first rows are ready by the time the ranks are
            try:
                backend.start()
            except (PlacementError, RankFailure) as failure:
                return self._end(Counts(), failure.exit_code, error=failure)
            self._signals.arm()
            outcome = self._loop(self._runner(feeder, backend, observer))
            graceful = outcome.error is None and not self._stopped_at_once
            return outcome
        finally:
            feeder.stop()
            observer.close()
            backend.close(graceful)

    def _observe(self) -> Observer:
        now = datetime.datetime.now(datetime.UTC)
        name = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        head = {"started": now.isoformat(timespec="seconds"), "rows_left": self.rows_left}
        return Observer(StatsFile(self._ledger.store, name, head), rows_left=self.rows_left)

    def _feeder(self, encoder: Encoder) -> Feeder:
        parts = (part for part in self._plan.iter_parts() if part.name not in self._done)
        job = self._prepared.job
        return Feeder(
            parts,
            encoder,
            queue_rows=QUEUE_ROWS,
            max_open_bytes=job.max_open_bytes,
            max_open_rows=job.max_open_rows,
        )

    def _runner(self, feeder: Feeder, backend: Backend, observer: Observer) -> Runner:
        job = self._prepared.job
        self._progress = Progress(self._plan.rows, self._before.rows)
        return Runner(
            feeder=feeder,
            backend=backend,
            commits=Commits(
                PartWriter(
                    job.sampling.n, job.output_prefix or "", self._provenance(), self._prepared.reader()
                ),
                self._ledger,
                self._lease,
            ),
            progress=self._progress,
            signals=self._signals,
            before=self._before,
            rows_left=self.rows_left,
            max_error_rate=job.max_error_rate,
            min_rows_for_rate=job.min_rows_for_error_rate,
            deadline=None if job.deadline_s is None else self._started + job.deadline_s,
            kept=self._kept,
            observer=observer,
        )

    def _loop(self, runner: Runner) -> Outcome:
        error: DeepInferError | None = None
        exit_code = 0
        try:
            ending = runner.run()
        except StopNow as stop:
            exit_code, self._stopped_at_once = stop.exit_code, True
        except DeepInferError as failure:
            if failure.exit_code not in (3, 4, 5):
                raise
            error, exit_code = failure, failure.exit_code
        else:
            self._stopped_at_once = runner.out_of_time
            if ending in (Ending.SIGNAL, Ending.NOTICE):
                exit_code = 128 + (self._signals.requested or signal.SIGTERM)
        finally:
            self._progress.close()
        return self._end(runner.counts, exit_code, runner.parts, runner.restarts, error)

    def _end(
        self,
        run: Counts,
        exit_code: int,
        parts: int = 0,
        restarts: int = 0,
        error: DeepInferError | None = None,
    ) -> Outcome:
        total = Counts()
        total.add(self._before)
        total.add(run)
        left = self._plan.rows - total.rows
        if not left and error is None and not self._stopped_at_once:
            exit_code = 0  # a signal that came when every row was under way has cost nothing
            error = self._write_results()
            exit_code = error.exit_code if error else 0
        summary = Summary(
            counts=total,
            run=run,
            seconds=time.monotonic() - self._started,
            restarts=restarts,
            parts=len(self._done) + parts,
            resumed_rows=self._before.rows,
            rows_left=left,
            output=str(self._prepared.job.output),
        )
        if exit_code != 5:
            self._ledger.write_json(SUMMARY, summary.as_dict())
        if left:
            self._say(f"{left:,} rows left; the same command goes on where this run ended")
        else:
            self._say(f"0 rows left; all {total.rows:,} rows are in {summary.output}")
        if total.errors and error is None:
            codes = ", ".join(f"{code} {count:,}" for code, count in total.error_codes.most_common())
            self._say(
                f"{total.errors:,} of {total.rows:,} rows ended in an error: {codes}. "
                f"Their column error says why; {self._ledger.store.path(QUARANTINE)} lists them"
            )
        return Outcome(summary, exit_code, error)

    def _write_results(self) -> DeepInferError | None:
        """The files of a batch that is complete; why they could not be written."""
        if self._results is None or self._results.there():
            return None
        names = [part.name for part in self._plan.iter_parts()]
        try:
            results, errors = self._results.write(
                lambda columns: (self._ledger.read_part(name, columns) for name in names)
            )
        except OutputError as error:
            return error
        self._say(f"{RESULTS} has {results:,} lines, {ERRORS} {errors:,}")
        return None

    def _provenance(self) -> dict[str, str]:
        manifest = self._manifest
        return {
            "version": __version__,
            "config_sha256": digest(manifest["settings"]),
            "model_sha256": digest(manifest["model"]),
            "input_sha256": digest(manifest["inputs"]),
            "seed": str(manifest["settings"]["seed"]),
        }

    def _kept(self, part: Part) -> dict[int, KeptOutcome]:
        """Rows of a part that is redone for its errors which had none."""
        if part.name not in self._again:
            return {}
        table = self._ledger.read_part(part.name)
        rows = kept_columns(table, self._prepared.job.output_prefix or "")
        return {index: KeptOutcome(row) for index, row in enumerate(rows) if row["error_code"] is None}
