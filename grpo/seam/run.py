"""A job as its trainer has it: run folder, groups, watch, what was asked of it, and how it ends."""

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
from grpo.record.provenance import arguments_of, changed_from_defaults, where_it_runs
from grpo.seam.view import TrainerView

KEPT_RESTARTS = 20

_log = logging.getLogger(__name__)


def say(*lines: str) -> None:
    """On the screen of rank 0."""
    for line in lines:
        _log.info("%s", line)


class JobRun:
    """What all parts know of the job. Every rank opens one at the same time, before anything slow starts."""

    groups: NodeGroups
    signals: StopSignals
    lead: StopLead
    attempt: int
    """These once it is open."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        self.folder: RunFolder | None = None
        """On global rank 0."""
        self.watch: FailureWatch | None = None
        """Where this rank has one."""
        self.stop: StopRequest | None = None
        """What every rank has agreed on."""
        self.must_resume = False
        """Whether the job is about to end for want of engines."""

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
            watch: where this rank has one.
            topology: with engines; also for `run.json`, as is what stands there `beside` the options.
            max_wait_s: as `NodeGroups` takes it.

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
            where = where_it_runs([json.loads(place) for place in places], topology)
            others = beside or {}
            changed = [*others, *changed_from_defaults(args)]
            folder.begin_attempt({**others, **arguments_of(args)}, where, changed=changed)
            signals.look = folder.stop_request
            return folder.attempt, folder.drop_old_requests()

        self.attempt, notes = self.groups.by_rank_zero(enter, tuple[int, list[str]])
        say(*notes)

    @contextlib.contextmanager
    def guarded(self, phase: str) -> Iterator[None]:
        """While this rank is in a phase of the job: a failure on any rank raises on every rank that can raise."""
        if self.watch is None:
            yield
            return
        with self.watch.guard(), self.watch.during(phase):
            yield

    def during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Name what this rank is doing, for the record of a failure."""
        return contextlib.nullcontext() if self.watch is None else self.watch.during(phase)

    def record_failure(self, why: str, kind: FailureKind, *, record: FailureRecord | None = None) -> None:
        """Tell this node's launcher, and on rank 0 write `failed` into the run's state. From any thread.

        Args:
            record: the job's, where it is known; `run.json` keeps it.
        """
        done = self._view.steps_done
        failed: dict[str, Any] = {"why": why, "kind": kind, "nodes": () if record is None else record.nodes}
        failed |= {"step": done} if done else {}
        note_failure(os.environ, **failed)
        self._update(state="failed", requeue=False, failure=record, **failed)

    def record_restart(self, what: str) -> None:
        """Say that an engine died and is back, on the screen and in the run's state."""
        if self.folder is not None:
            say(what)
            restarts = (*self.folder.state.restarts, f"after step {self._view.steps_done}: {what}")
            self._update(restarts=restarts[-KEPT_RESTARTS:])

    def _update(self, **changes: Any) -> None:
        """Write into the run's state, where that can be done: a full disk may be the cause, and must not hide it."""
        if self.folder is not None:
            try:
                self.folder.update(**changes)
            except OSError as error:
                say(f"cannot write {self.folder.path / STATE_FILE}: {error}")

    @contextlib.contextmanager
    def recording_failures(self, output_dir: str) -> Iterator[None]:
        """Around what may fail: the run's state says how it ended.

        Args:
            output_dir: where it is kept; before `open` only what ends the job is recorded.
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
        """Let another job into the output folder."""
        if self.folder is not None:
            self.folder.release()
