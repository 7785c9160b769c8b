"""The five kinds of failure, and what each one costs.

Knows: names and exit codes. Does not know: who raises or handles them.

A message says what was wrong, where (file, key, row id), and what to do next.
"""

from __future__ import annotations


class DeepInferError(Exception):
    """Base of every error this project raises on purpose; `exit_code` is the process's exit status."""

    exit_code = 1


class ConfigError(DeepInferError):
    """A configuration (ours or the checkpoint's `config.json`) breaks a rule. Nothing was started."""

    exit_code = 2


class CheckpointError(DeepInferError):
    """A checkpoint is incomplete, unreadable or of the wrong shape. Nothing was started."""

    exit_code = 2


class InputError(DeepInferError):
    """An input data set as a whole cannot be used (missing column, duplicate ids, no such file)."""

    exit_code = 2


class RowError(DeepInferError):
    """One row cannot be run. Never kills a job: the row carries `code` and the message.

    `code` is one of the error codes of the output schema, e.g. `prompt_too_long`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RankFailure(DeepInferError):  # noqa: N818
    """A rank died or stopped answering; its gang is rebuilt and its rows are redone."""

    exit_code = 4


class PlacementError(DeepInferError):
    """The cluster cannot give the resources that were asked for; names demand and supply."""

    exit_code = 4


class OutputError(DeepInferError):
    """Writing output failed (disk full, permission, vanished directory). The job can be resumed."""

    exit_code = 5


class JobError(DeepInferError):
    """The job as a whole cannot go on, e.g. its error rate was exceeded. The job can be resumed."""

    exit_code = 3
