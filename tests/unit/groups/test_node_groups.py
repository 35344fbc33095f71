"""A process alone, which answers itself."""

import pytest

from grpo.faults.failure import FailureRecord, GenerationDropped, JobFailed
from grpo.faults.signals import StopRequest
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.timeouts import Timeouts
from tests.support.made_up_jobs import job

RECORD = FailureRecord(node=0, rank=0, host="a", phase="sync", cause="EngineError: gone")


def test_exchange_of_lone_process_returns_own_value_or_raises_record() -> None:
    (topology, *_) = job((8,), ranks=1)
    groups = NodeGroups(topology, max_wait_s=1.0)
    watch = FailureWatch(None, node=0, rank=0, host="a", timeouts=Timeouts(signal_patience_s=0.0))
    assert groups.all_gather("7") == ["7"]
    assert groups.exchange(watch, None, 7, int) == [7]
    with pytest.raises(JobFailed, match="EngineError: gone"):
        groups.exchange(watch, RECORD)
    watch.signals.request = StopRequest(why="got SIGUSR1", requeue=True)
    with pytest.raises(GenerationDropped, match=r"\(got SIGUSR1\).*GRPO-612") as caught:
        groups.exchange(watch, RECORD)
    assert caught.value.why == "got SIGUSR1"
    watch.signals.release()
