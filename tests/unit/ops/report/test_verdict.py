"""Advice: each on a run that has its fault, none on a healthy one, and every option is one that there is."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo import GRPOConfig
from grpo.ops import MOST_AHEAD
from grpo.ops.report.advice import ADVICE, Advice, advice_for, figures_of
from grpo.ops.report.reading import read_run
from grpo.ops.report.shares import RECENT_LOGS, left_s, parts_of, tokens_per_gpu
from grpo.ops.report.verdict import Headline, duration, verdict_of
from grpo.ops.train.arguments import GRPOScriptArguments
from tests.support.made_runs import FAULTS, MadeRun, make_run

# What the first advice names; a failed attempt is reported, and changes no option.
EXPECTED: dict[str, set[str]] = {
    "": set(),
    "slow-node": {"vllm_balance_nodes"},
    "idle-engines": {"generation_lookahead"},
    "waiting-ranks": {"generation_lookahead", "vllm_reserved_gpus"},
    "long-tail": {"generation_lookahead"},
    "slow-reward": {"reward_funcs"},
    "slow-sync": {"steps_per_generation"},
    "slow-save": {"save_steps"},
    "no-spread": {"num_generations"},
    "clipped": {"max_completion_length"},
    "refused": {"vllm_max_model_length"},
    "restarts": {"vllm_standby"},
    "gap": {"vllm_engine_kwargs"},
    "drift": {"vllm_max_logprob_gap"},
    "failed": set(),
}
IN_SENTENCE = {
    "": "Nothing to change was found: engines idle",
    "slow-node": "Node 1 was slowest in 100 % of the steps (2.0 times the others' time): set vllm_balance_nodes to tr",
    "idle-engines": "and ranks wait 38 %: set generation_lookahead to 1.",
    "long-tail": "for completions, the longest of which have 10 times the mean: set generation_lookahead to 4.",
    "slow-reward": "most of it accuracy",
    "drift": "The engines of node 1 drifted away from the trainer (1 warning, log-probabilities up to 0.09 nats apart)",
    "failed": "1 of 2 attempts failed in training on node 1 in the phase 'sync'",
}


def verdict(folder: Path) -> Headline:
    run = read_run(folder)
    return verdict_of(figures_of(run, parts_of(run.timeline.spans)))


def option_of(advice: Advice) -> str:
    """What it names first."""
    return re.split(r"[:,]", advice.setting)[0]


def changed(folder: Path, to: Path, **arguments: object) -> Path:
    """A copy of a run with other settings; `topology` and `attempts` are merged in."""
    shutil.copytree(folder, to)
    reported = json.loads((to / "run.json").read_text())
    reported["attempts"][-1]["topology"] |= arguments.pop("topology", {})  # type: ignore[operator]
    reported["attempts"][-1]["arguments"] |= arguments
    (to / "run.json").write_text(json.dumps(reported))
    return to


@pytest.mark.parametrize("fault", FAULTS)
def test_verdict_of_fault_gives_its_advice_and_none_for_healthy_run(
    fault: str, run_with: Callable[[str], Path]
) -> None:
    found = verdict(run_with(fault))
    assert {*map(option_of, found.advice)} == EXPECTED[fault], found.sentence
    assert found.is_good == (fault == "")
    assert IN_SENTENCE.get(fault, "") in found.sentence


def test_advice_names_only_existing_options(run_with: Callable[[str], Path]) -> None:
    known = GRPOConfig.__dataclass_fields__.keys() | GRPOScriptArguments.__dataclass_fields__.keys()
    named = set().union(*EXPECTED.values())
    assert named <= known
    for fault in FAULTS:
        for advice in verdict(run_with(fault)).advice:
            assert option_of(advice) in advice.do


def test_advice_with_option_already_set_omits_it(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    balanced = changed(run_with("slow-node"), tmp_path / "balanced", vllm_balance_nodes=True)
    assert verdict(balanced).advice == ()
    by_default = changed(
        run_with("slow-node"), tmp_path / "by-default", generation_lookahead=2, vllm_balance_nodes=None
    )
    assert "vllm_balance_nodes: true" not in [advice.setting for advice in verdict(by_default).advice]
    standby = changed(run_with("restarts"), tmp_path / "standby", vllm_standby=True)
    assert verdict(standby).advice == ()
    ahead = changed(run_with("waiting-ranks"), tmp_path / "ahead", generation_lookahead=1)
    assert [advice.setting for advice in verdict(ahead).advice] == ["vllm_reserved_gpus: 2"]


def test_lookahead_advice_follows_longest_completion_time(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """50 s, of which the ranks' own work is 20: ready after three steps."""
    tail = run_with("long-tail")
    assert [advice.setting for advice in verdict(tail).advice] == ["generation_lookahead: 4"]
    for now, advised in ((0, ["generation_lookahead: 4"]), (3, ["generation_lookahead: 4"]), (4, [])):
        ahead = verdict(changed(tail, tmp_path / str(now), generation_lookahead=now)).advice
        assert [each.setting for each in ahead if each.setting.startswith("generation_lookahead")] == advised
    refused = verdict(changed(tail, tmp_path / "refused", generation_lookahead=0, streams=True)).advice
    assert [each.setting for each in refused] == ["vllm_reserved_gpus: 2"]
    short = make_run(tmp_path / "short", MadeRun(steps=20, nodes=2, fault="long-tail", times={"generate": 2000.0}))
    assert [advice.setting for advice in verdict(short).advice] == [f"generation_lookahead: {MOST_AHEAD}"]


def test_advice_with_shm_sync_backend_names_nccl_alone(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    shared = changed(run_with("slow-sync"), tmp_path / "shared", vllm_sync_backend="shm")
    assert [advice.setting for advice in verdict(shared).advice] == ["vllm_sync_backend: nccl"]


def test_advice_for_idle_engines_with_lookahead_frees_gpu(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made", MadeRun(steps=20, nodes=2, times={"generate": 5.0}))
    assert verdict(made).advice == ()  # one engine cannot be fewer
    two = changed(made, tmp_path / "two", topology={"engines_by_node": [1, 2]})
    assert [advice.setting for advice in verdict(two).advice] == ["vllm_reserved_gpus: 1"]
    before = {"engines_by_node": None, "engines_per_node": 2}  # as it was told when nodes could not differ
    old = changed(made, tmp_path / "old", topology=before)
    assert [advice.setting for advice in verdict(old).advice] == ["vllm_reserved_gpus: 1"]


def test_advice_for_cpu_engines_names_engines_per_node(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"generation_lookahead": 1, "topology": {"has_gpus": False}}
    cpus = changed(run_with("waiting-ranks"), tmp_path / "cpus", **settings)
    assert [advice.setting for advice in verdict(cpus).advice] == ["vllm_engines_per_node: 2"]


@pytest.mark.parametrize("fault", ["idle-engines", "long-tail"])
def test_advice_without_gpus_omits_lookahead(fault: str, run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """Ranks and engines of a machine without GPUs take each other's cores: whoever works does not wait for free."""
    advice = verdict(changed(run_with(fault), tmp_path / "cpus", topology={"has_gpus": False})).advice
    assert "generation_lookahead" not in {option_of(each) for each in advice}
    healthy = verdict(changed(run_with(""), tmp_path / "healthy", topology={"has_gpus": False}))
    assert healthy.sentence.endswith("; without GPUs they take turns on the same cores.")


@pytest.mark.parametrize("beside", ["tools", "environment_factory", "rollout_func"])
def test_advice_for_episodes_names_lookahead_but_no_node_balance(
    beside: str, run_with: Callable[[str], Path], tmp_path: Path
) -> None:
    (ahead,) = verdict(changed(run_with("idle-engines"), tmp_path / "idle", **{beside: True})).advice
    assert ahead.setting == "generation_lookahead: 1"
    assert "grpo.in_threads" in ahead.why
    (ahead,) = verdict(changed(run_with("long-tail"), tmp_path / "tail", **{beside: True})).advice
    assert ahead.setting == "generation_lookahead: 4"
    assert verdict(changed(run_with("slow-node"), tmp_path / "slow", **{beside: True})).advice == ()


@pytest.mark.parametrize("beside", [{"streams": True}, {"vllm_importance_sampling_correction": False}])
def test_advice_with_lookahead_unsupported_names_reserved_gpus(
    beside: dict[str, bool], run_with: Callable[[str], Path], tmp_path: Path
) -> None:
    waiting = verdict(changed(run_with("waiting-ranks"), tmp_path / "waiting", **beside))
    assert [advice.setting for advice in waiting.advice] == ["vllm_reserved_gpus: 2"]


def test_sync_advice_with_accumulation_doubles_whole_batch(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    slow = changed(run_with("slow-sync"), tmp_path / "slow", steps_per_generation=1, gradient_accumulation_steps=8)
    assert [advice.setting for advice in verdict(slow).advice] == ["steps_per_generation: 16"]


@pytest.mark.parametrize(("every", "advised"), [(50, "save_steps: 350"), (0.1, "save_steps: 56")])
def test_save_advice_handles_steps_share_and_epochs(
    every: float, advised: str, run_with: Callable[[str], Path], tmp_path: Path
) -> None:
    slow = run_with("slow-save")
    assert [each.setting for each in verdict(changed(slow, tmp_path / "by", save_steps=every)).advice] == [advised]
    assert verdict(changed(slow, tmp_path / "epochs", save_strategy="epoch")).advice == ()


def test_lost_steps_ignore_attempts_without_training(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """One between two that did, which says nothing of its settings; and a second start in a finished run's folder."""
    between = changed(run_with("failed"), tmp_path / "between")
    reported = json.loads((between / "run.json").read_text())
    first, second = reported["attempts"]
    silent = {"attempt": 1, "started": second["started"] - 60, "ended": second["started"] - 30, "state": "failed"}
    (between / "run.json").write_text(json.dumps({"attempts": [first, silent, second]}))
    assert verdict(between).advice == ()
    (between / "run.json").write_text(json.dumps({"attempts": [first, second, {**silent, "started": 3e9}]}))
    figures = figures_of(run := read_run(between), parts_of(run.timeline.spans))
    assert (figures.option("num_generations", 0), run.num_nodes) == (8, 3)
    again = {**second, "from_step": 0}
    (between / "run.json").write_text(json.dumps({"attempts": [{**first, "state": "finished"}, again]}))
    assert verdict(between).advice == ()


def test_failures_before_first_step_are_counted_apart(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """A typo at the first start says nothing of the run that was trained afterwards."""
    folder = changed(run_with("failed"), tmp_path / "starts")
    first, second = json.loads((folder / "run.json").read_text())["attempts"]
    typo = {**first, "attempt": 0, "started": first["started"] - 60, "ended": first["started"] - 30, "step": 0}
    state = json.loads((folder / "run_state.json").read_text())

    def verdict_with(*attempts: dict[str, object], **ending: object) -> tuple[Headline, str]:
        (folder / "run.json").write_text(json.dumps({"attempts": attempts}))
        (folder / "run_state.json").write_text(json.dumps(state | ending))
        found = verdict(folder)
        return found, next(f"{tile.value}, {tile.note}" for tile in found.tiles if tile.label == "Failures")

    found, tile = verdict_with(typo, {**second, "from_step": 0})
    assert found.sentence.startswith("Nothing to change was found")
    assert tile == "1, 1 before the first step"
    found, tile = verdict_with(first, {**typo, "started": first["ended"], "from_step": first["step"]}, second)
    assert found.sentence == "1 of 3 attempts failed in training on node 1 in the phase 'sync'."
    assert tile == "2, 1 before the first step"
    (folder / "metrics.jsonl").unlink()
    failed, _ = verdict_with(typo, state="failed", step=0)
    assert failed.sentence == "The run failed on node 1 in the phase 'sync' before its first step."


def test_slow_node_advice_with_fewer_nodes_names_present_node(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """The last attempt has two nodes of three; the last node was slow before."""
    fewer = changed(run_with(""), tmp_path / "fewer", topology={"num_nodes": 2})
    lines = [json.loads(line) for line in (fewer / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["by_node"]["rollout/generate_s"] = [20, 20, 60] if number < len(lines) / 2 else [20, 60]
    (fewer / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdict(fewer).sentence.startswith("Node 1 was slowest in 100 %")


def test_advice_after_lost_steps_lowers_save_steps(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    lost = changed(run_with("failed"), tmp_path / "lost")
    reported = json.loads((lost / "run.json").read_text())
    reported["attempts"][0]["step"] = reported["attempts"][1]["from_step"] + 30
    (lost / "run.json").write_text(json.dumps(reported))
    (advice,) = verdict(lost).advice
    assert (advice.setting, advice.finding) == ("save_steps: 12", "30 steps were lost between attempts")


def test_advice_functions_except_two_fire_on_fault_runs(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    spoke = set()
    for fault in FAULTS:
        run = read_run(run_with(fault))
        figures = figures_of(run, parts_of(run.timeline.spans))
        spoke |= {each.__name__ for each in ADVICE if each(figures) is not None}
    assert {each.__name__ for each in ADVICE} - spoke == {"fewer_engines", "lost_steps"}  # two tests above


def test_advice_for_short_run_is_empty(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made", MadeRun(steps=3, nodes=2, fault="clipped"))
    run = read_run(made)
    assert advice_for(figures_of(run, parts_of(run.timeline.spans))) == []
    assert verdict(made).sentence == "3 steps are too few to advise by."


def test_throughput_per_gpu_counts_inference_gpus(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of engines too: 500,000 tokens a step, prompts among them."""
    run = read_run(run_with(""))
    logs = min(RECENT_LOGS, len(run.metrics.times) - 1)
    recent = run.metrics.times[-1] - run.metrics.times[-1 - logs]
    topology = run.settings.topology
    gpus = topology["world_size"] + topology["num_nodes"]
    assert tokens_per_gpu(run) == pytest.approx(500_000 * logs / recent / gpus)
    (tile,) = [tile for tile in verdict(run_with("")).tiles if tile.label == "Throughput"]
    assert (tile.value, tile.note) == (
        f"{tokens_per_gpu(run):,.0f} tokens/s",
        "trained on, per GPU, ranks' and engines'",
    )
    several = changed(
        run_with(""), tmp_path / "several", topology={"engines_by_node": [3, *topology["engines_by_node"][1:]]}
    )
    assert tokens_per_gpu(read_run(several)) == pytest.approx(500_000 * logs / recent / (gpus + 2))


def test_verdict_of_running_run_shows_time_left_and_stall(
    run_with: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = changed(run_with(""), tmp_path / "going", max_steps=180)
    state = json.loads((going / "run_state.json").read_text())
    (going / "run_state.json").write_text(json.dumps({**state, "state": "running"}))
    run = read_run(going)
    monkeypatch.setattr("grpo.ops.report.verdict.time.time", lambda: run.metrics.times[-1] + 300)
    left = left_s(run)
    assert left is not None
    assert left == pytest.approx(100 * 22, rel=0.1)
    seldom = [json.loads(line) for line in (going / "metrics.jsonl").read_text().splitlines()]
    for line in seldom:
        line["time"] += 200 * (line["step"] // 10)  # an evaluation: no step in the middle has one
    longer = make_run(tmp_path / "longer", MadeRun(steps=2, nodes=1))
    shutil.copy(going / "run.json", longer / "run.json")
    shutil.copy(going / "run_state.json", longer / "run_state.json")
    (longer / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in seldom))
    assert left_s(read_run(longer)) == pytest.approx(left + 100 * 20, rel=0.05)
    tiles = {tile.label: tile.value for tile in verdict(going).tiles}
    assert tiles["Time left"] == duration(left)
    assert tiles["State"] == "running"
    assert verdict(going).is_good
    monkeypatch.setattr("grpo.ops.report.verdict.time.time", lambda: run.metrics.times[-1] + 3600)
    assert "No step was logged for 1 h 0 min" in verdict(going).sentence


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.25, "3.2 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (400_000, "4 d 15 h")]
)
def test_duration_formats_seconds(seconds: float, words: str) -> None:
    assert duration(seconds) == words
