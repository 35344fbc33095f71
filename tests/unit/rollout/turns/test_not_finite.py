"""In episodes, too, an engine has to know what it samples."""

import math

import pytest

from grpo.faults.failure import StepFailed
from tests.support.engines import Script
from tests.support.made_up_tools import times
from tests.support.speaking_engine import Make, calculates, steps_of


def test_episodes_with_nan_logprobs_end_job(make: Make, script: Script) -> None:
    script.logprobs_of = lambda sample, tokens: [math.nan] * len(tokens)
    with pytest.raises(StepFailed, match=r"engine 0 of node 0 gave .*\[GRPO-417\]"):
        steps_of(make(calculates, tools=[times]))
