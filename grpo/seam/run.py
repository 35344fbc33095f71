"""The trainer's job: run folder, groups, watch, stop requests, and how it ends."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from grpo.checkpoints.deepspeed_settings import check_deepspeed
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed
from grpo.faults.kinds import ends_job, kind_of, text_of
from grpo.faults.liveness import START_TIMEOUT_S
from grpo.faults.signals import LEAD_VARIABLE, StopLead, StopRequest, StopSignals
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups, as_one_node
from grpo.place.launch import host_name, read_launch
from grpo.place.topology import NodeTopology
from grpo.record.files import STATE_FILE, note_failure, note_run
from grpo.record.folder import RunFolder, record_early_failure
from grpo.record.provenance import arguments_of, changed_from_defaults, describe_placement
from grpo.seam.view import TrainerView

KEPT_RESTARTS = 20

_log = logging.getLogger(__name__)


def say(*lines: str) -> None:
    """Print lines on rank 0's screen."""
    for line in lines:
        _log.info("%s", line)


class JobRun:
    """State of the job shared by all parts. All ranks open it at the same time, before anything slow starts."""

    groups: NodeGroups
    signals: StopSignals
    lead: StopLead
    attempt: int
    """Attempt number, from 0. Set by `open`, like the three fields above."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        self.folder: RunFolder | None = None
        """Run folder; None on ranks other than 0."""
        self.watch: FailureWatch | None = None
        """This rank's watch; None in other modes than local."""
        self.stop: StopRequest | None = None
        """Stop request that all ranks have agreed on."""
        self.must_resume = False
        """True if the job is about to end because too few engines are left."""

    def open(
        self,
        args: TrainingArguments,
        signals: StopSignals,
        watch: FailureWatch | None = None,
        *,
        topology: NodeTopology | None = None,
        max_wait_s: float = 0.0,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the output folder. Collective.

        Args:
            watch: this rank's watch, if any.
            topology: place of the ranks; None without engines.
            max_wait_s: longest wait for another rank; see `NodeGroups`.
            beside: more entries of `run.json`, beside the options.

        Raises:
            ValueError: another job is in the folder.
        """
        self.signals, self.watch = signals, watch
        launch = read_launch(os.environ)
        self.groups = NodeGroups(
            topology or as_one_node(launch),
            max_wait_s=max_wait_s,
            start_timeout_s=getattr(args, "start_timeout", START_TIMEOUT_S),
            watch=watch,
        )
        self.lead = StopLead(os.environ.get(LEAD_VARIABLE), say)
        note_run(Path(args.output_dir), os.environ)
        check_deepspeed(args.deepspeed_plugin and args.deepspeed_plugin.deepspeed_config)
        places = self.groups.all_gather(json.dumps([launch.node, host_name(os.environ)]))

        def enter() -> tuple[int, list[str]]:
            self.folder = folder = RunFolder(Path(args.output_dir), os.environ)
            where = describe_placement([json.loads(place) for place in places], topology)
            others = beside or {}
            changed = [*others, *changed_from_defaults(args)]
            folder.begin_attempt({**others, **arguments_of(args)}, where, changed=changed)
            signals.look = folder.stop_request
            return folder.attempt, folder.drop_old_requests()

        self.attempt, notes = self.groups.by_rank_zero(enter, tuple[int, list[str]])
        say(*notes)

    @contextlib.contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """Set this rank's phase; a failure on any rank raises on every rank that can raise."""
        if self.watch is None:
            yield
            return
        with self.watch.guard(), self.watch.during(phase):
            yield

    def during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Set this rank's phase, for the failure record."""
        return contextlib.nullcontext() if self.watch is None else self.watch.during(phase)

    def record_failure(self, why: str, kind: FailureKind, *, record: FailureRecord | None = None) -> None:
        """Report a failure to this node's launcher; rank 0 also writes `failed` into the run's state. From any thread.

        Args:
            record: the job's failure record, if known, for `run.json`.
        """
        done = self._view.steps_done
        failed: dict[str, Any] = {"why": why, "kind": kind, "nodes": () if record is None else record.nodes}
        failed |= {"step": done} if done else {}
        note_failure(os.environ, **failed)
        self._update(state="failed", requeue=False, failure=record, **failed)

    def record_restart(self, what: str) -> None:
        """Report an engine's restart, on the screen and in the run's state."""
        if self.folder is not None:
            say(what)
            restarts = (*self.folder.state.restarts, f"after step {self._view.steps_done}: {what}")
            self._update(restarts=restarts[-KEPT_RESTARTS:])

    def _update(self, **changes: Any) -> None:
        """Write into the run's state. An `OSError` is only printed: a full disk may be the very failure to report."""
        if self.folder is not None:
            try:
                self.folder.update(**changes)
            except OSError as error:
                say(f"cannot write {self.folder.path / STATE_FILE}: {error}")

    @contextlib.contextmanager
    def recording_failures(self, output_dir: str) -> Iterator[None]:
        """Record an exception of the `with` block in the run's state.

        Args:
            output_dir: folder of the run's state. Before `open`, only failures that end the job are recorded.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                record = error.record if isinstance(error, JobFailed) else None
                self.record_failure(text_of(error), kind_of(error), record=record)
                if ends_job(error) and self.folder is None and read_launch(os.environ).rank == 0:
                    record_early_failure(Path(output_dir), os.environ, text_of(error), kind_of(error))
            raise

    def release(self) -> None:
        """Free the output folder for another job."""
        if self.folder is not None:
            self.folder.release()
