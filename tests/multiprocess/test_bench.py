"""The short form of each benchmark, started as a user starts it: that it works and what it writes, not how fast."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT, start

SHORT_FORMS = {
    # benchmark: (the beginning of each ratio's name, figures that it must have with their units)
    "weight_sync": (
        (
            *(
                "TRL's packed stream / own weight sync",
                "TRL loads in the process / own weight sync",
                "one call for each parameter /",
            ),
            *(
                "bound / own weight sync",
                "own weight sync / slower",
                "own weight sync / with its bits",
                "adapters alone / with its bits",
            ),
            "experts one by one / at once",
        ),
        {
            "own weight sync": "s",
            "TRL loads in the process": "s",
            "own weight sync by all-gather": "s",
            "memory of own weight sync, rank 0": "MiB",
            "received by all-gather, rank 1": "MiB",
            "experts at once": "s",
        },
    ),
    "padding": (
        ("as TRL pads / trimmed",),
        {"training, as TRL pads": "s", "training, trimmed": "s", "share of padding, trimmed": ""},
    ),
    "overlap": (
        ("steps/s, lookahead 1 / lookahead 0", "the same, at the bound", "bound of a step"),
        {"step, lookahead 0": "s", "step, lookahead 1": "s"},
    ),
    "overlap_ragged": (
        (
            "tokens/s, lookahead 4 / lookahead 1",
            "1.15 x the larger work + weight sync",
            "training work / sampling work",
        ),
        {"training on a batch": "s", "lookahead 1: step": "s", "lookahead 4: share in which the engine is idle": ""},
    ),
    "dispatch": (("0.2 s / dispatch", "TRL's lists / dispatch"), {"dispatch": "s", "all equal: pool": "tokens/s"}),
    "generate": (("LocalVLLM / LLM.generate, same seeds",), {"LocalVLLM.generate": "tokens/s"}),
    "multi_turn": (
        ("TRL's loop / in threads", "TRL's loop / in the main thread"),
        {"in threads": "s", "in the main thread": "s", "TRL's loop": "s"},
    ),
    "multi_turn_ahead": (
        ("training of 1 of the episodes: the larger of both / a step",),
        {"episodes of a batch": "s", "training of 0.8 of the episodes: a step": "s"},
    ),
    "neighbours": (
        ("first node: both alike / beside twice the turns", "second node's own time / the batch's"),
        {"first node, both alike": "s", "batch, one with twice the turns": "s"},
    ),
    "agents": (("a step / beside idle connections",), {"a step": "s", "beside idle connections": "s"}),
    "rewards": (
        (
            *("full overlap / declared", "TRL's place / declared", "TRL's place / undeclared"),
            *("TRL's place, async def / declared", "TRL's place, async def / declared, async def"),
        ),
        {"declared": "s", "undeclared": "s", "TRL's place": "s", "declared, and no reward to wait for": "s"},
    ),
    "lora": (("with an adapter / without",), {"with an adapter": "tokens/s", "without": "tokens/s"}),
    "balance": (("balanced / every node for itself", "1.15 x tokens"), {"balanced": "tokens/s"}),
    "startup": (
        ("one after the other / side by side", "bound by CPU time"),
        {"side by side": "s", "side by side: startup/waited_for_engine_s": "s"},
    ),
    "save": (
        ("as before / beside training", "at once / beside training", "beside training / shards alone"),
        {"held for a GB, as before": "s/GB", "held, beside training": "s", "until complete, beside training": "s"},
    ),
    "timeline": (
        ("0.2 % of a step of 1 s / what watching it costs",),
        {"spans of a step, written": "µs", "one look at all devices": "µs", "of a step of 1 s": "%"},
    ),
    "watch": (
        ("5 s / until all know of a killed node",),
        {"false alarms": "", "until all know of a killed node": "s", "node 0's sentinel, of a core": "%"},
    ),
    "scale": (
        (
            *(f"assumed, 4 nodes: {layout}" for layout in ("node-local", "central server", "central pool", "coloc")),
            *(f"reasoning, 1 node: {layout}" for layout in ("node-local, lookahead 0", "central pool, lookahead 4")),
        ),
        {
            "assumed, 4 nodes, node-local, lookahead 1: training GPUs idle": "%",
            "answers, 1 node, node-local, lookahead 8: step": "s",
        },
    ),
}


# Of whole stacks, or of minutes: `make test-long` alone runs them.
LONG = (
    "weight_sync",
    "dispatch",
    "generate",
    "multi_turn",
    "multi_turn_ahead",
    "neighbours",
    "agents",
    "rewards",
    "overlap",
    "overlap_ragged",
    "save",
    "startup",
    "balance",
    "lora",
    "timeline",
    "watch",
    "padding",
)
SHORT = ("scale",)
NAMES = (*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG))


def test_benchmark_lists_cover_all_short_forms() -> None:
    assert {*LONG, *SHORT} == set(SHORT_FORMS)


@pytest.mark.parametrize("name", NAMES)
def test_short_form_of_benchmark_writes_result(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", f"bench.{name}", "--device", "cpu", "--short", "--output", str(output)]
    job = start(lambda _: command, tmp_path / "job", env={"PYTHONPATH": str(ROOT)})
    try:
        code = job.wait(480)
        assert code == [0], job.fail(f"bench.{name} failed")
        assert job.traces() == set()
    finally:
        job.end()
    check_result(name, json.loads(output.read_text()))
    assert "│" in job.output()  # the table


def check_result(name: str, result: dict) -> None:
    ratios, figures = SHORT_FORMS[name]
    assert result["benchmark"] == name
    assert result["command"].startswith(f"python -m bench.{name} --device cpu --short")
    assert result["settings"]["short"] is True
    assert result["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {"python", "torch", "trl"} <= result["versions"].keys()
    for beginning in ratios:
        assert any(ratio["name"].startswith(beginning) for ratio in result["ratios"]), beginning
    assert all(0 < value < math.inf for ratio in result["ratios"] for value in ratio["values"])
    units = {figure["name"]: figure["unit"] for figure in result["figures"]}
    assert figures.items() <= units.items()
    assert all(0 <= value < math.inf for figure in result["figures"] for value in figure["values"])
