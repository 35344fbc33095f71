"""Prompts refused by the engines: left out with a warning, up to a limit."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from grpo.faults.failure import FailureKind, StepFailed
from grpo.rollout.report import GenerationReport

_log = logging.getLogger(__name__)


class Refusals:
    """Counts refused completions of the job; the same on every rank.

    Args:
        most: completions that may be left out (`vllm_max_refused`).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_so_far = 0

    def look_at(self, reports: Sequence[GenerationReport]) -> None:
        """Check the reports, and warn of refused prompts.

        Raises:
            StepFailed: too many were refused, or an engine returns non-finite log-probabilities.
        """
        for report in reports:
            if report.not_finite is not None:
                raise StepFailed(report.not_finite)
        refused = [report for report in reports if report.refusal is not None]
        if not refused:
            return
        num_now = sum(report.num_refused for report in refused)
        self._num_so_far += num_now
        first = refused[0].refusal
        assert first is not None
        reported = f"{num_now} completions left out, {self._num_so_far} so far [GRPO-412]: {first.cause}"
        if self._num_so_far > self._most:
            cause = f"more than vllm_max_refused ({self._most}) completions were left out: {reported}"
            raise StepFailed(replace(first, cause=cause, kind=FailureKind.USER))
        _log.warning("WARNING: %s", reported)
