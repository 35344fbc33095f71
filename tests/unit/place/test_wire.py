"""What ranks tell each other, to JSON and back: each comes as what it was, and nothing else does."""

import math
from typing import Any

import numpy as np
import pytest

from grpo.engine.supervisor import EngineRestart
from grpo.faults.failure import FailureKind, FailureRecord
from grpo.place.wire import from_json, to_json
from grpo.rollout.node import Stalled
from grpo.rollout.packing import Request
from grpo.rollout.report import GenerationReport
from grpo.serving import _EngineFacts
from grpo.weights.delivery import _Arrivals
from grpo.weights.report import LogprobGap, WeightSyncReport
from grpo.weights.wire_format import WireFormat

RECORD = FailureRecord(node=1, rank=2, host="b", phase="sync", cause="gone: ä\n'x'", kind=FailureKind.USER, nodes=(1,))
REPORT = GenerationReport(generate_s=0.1, wait_s=1 / 3, idle_s=0, period_s=None, num_tokens=7, num_completions=2)
SYNC = WeightSyncReport(total_s=1.5, gather_s=1e-9, send_s=0.0, num_bytes=2**40)
RESTART = EngineRestart(node=1, index=0, host="b", phase="train", cause="killed", seconds=12.5)
FORMAT = WireFormat(dtypes={"a.b": "float32"}, whole_experts=("x",))

REPORTED: list[tuple[Any, Any]] = [
    (None, None),
    (REPORT, GenerationReport | Stalled | None),
    (Stalled(), GenerationReport | Stalled | None),
    (Stalled(for_good=RECORD), GenerationReport | Stalled | None),
    (None, GenerationReport | Stalled | None),
    (_Arrivals(), _Arrivals),
    (_Arrivals(restarts=(RESTART,), gone=RECORD), _Arrivals),
    ((True, None), tuple[bool, WeightSyncReport | None]),
    ((False, SYNC), tuple[bool, WeightSyncReport | None]),
    (_EngineFacts(startup_s=8.25, max_model_len=64, wire_format=FORMAT), _EngineFacts | None),
]


@pytest.mark.parametrize(("value", "kind"), REPORTED)
def test_wire_round_trip_keeps_value(value: Any, kind: Any) -> None:
    assert from_json(to_json(value, kind), kind) == value


def test_wire_round_trip_of_request_keeps_tokens() -> None:
    request = Request(token_ids=np.array([5, 6]), n=2, seed=2**62 + 1)  # int64, as numpy makes them
    kind = dict[int, list[Request]]
    (came,) = from_json(to_json({1: [request]}, kind), kind)[1]
    assert came.token_ids.dtype == np.int32
    assert (came.token_ids.tolist(), came.n, came.seed) == ([5, 6], 2, 2**62 + 1)


def test_wire_round_trip_of_nan_and_infinity_keeps_them() -> None:
    reported = WeightSyncReport(
        total_s=1, gather_s=1, send_s=1, num_bytes=1, gap=LogprobGap(mean=math.nan, max=math.inf, judged=0.5)
    )
    came = from_json(to_json(reported, WeightSyncReport), WeightSyncReport)
    assert math.isnan(came.gap.mean)
    assert came.gap.max == math.inf


@pytest.mark.parametrize("said", ["", "[]", '{"for_good": 3}', '{"more": 1}', "\x80\x04K\x01."])
def test_from_json_of_other_text_raises(said: str) -> None:
    with pytest.raises(ValueError, match="of this version"):
        from_json(said, Stalled)
