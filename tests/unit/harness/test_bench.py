"""The frame of the benchmarks and the simulated cluster, by numbers worked out by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import measured, overlap_ragged, tables
from bench.report import RESULTS as RESULTS_FOLDER
from bench.report import Figure, Ratio, Report, argument_parser, finish, interleave, number, ratio
from bench.scale import draw, measured_node, read_result, share_of_bound
from bench.scale_model import (
    Cluster,
    Node,
    best_reserved,
    central_pool,
    central_server,
    colocated,
    node_local,
    simulate,
    slowest_of,
)
from tools import code_digest

SLOW = Figure(name="one at a time", unit="s", values=(6.0, 4.0, 9.0))
FAST = Figure(name="in buckets", unit="s", values=(2.0, 4.0, 3.0))


def make_report(**settings: object) -> Report:
    return Report(
        benchmark="weight_sync",
        settings={"model": "tiny", **settings},
        ratios=(ratio("one at a time / in buckets", SLOW, FAST, goal=1.5), ratio("inverse", FAST, SLOW, goal=1.0)),
        figures=(SLOW, FAST, Figure(name="size", unit="MiB", values=(12345.6,))),
        notes=("two ranks share two cores",),
    )


def test_figure_computes_median_and_range() -> None:
    assert (SLOW.median, SLOW.low, SLOW.high) == (6.0, 4.0, 9.0)
    assert Figure(name="two", unit="s", values=(1.0, 2.0)).median == 1.5
    with pytest.raises(ValueError, match="'none' has no values"):
        Figure(name="none", unit="s", values=())


def test_ratio_divides_pair_by_pair() -> None:
    paired = ratio("slow / fast", SLOW, FAST, goal=3.0)
    assert paired.values == (3.0, 1.0, 3.0)
    assert (paired.median, paired.low, paired.high) == (3.0, 1.0, 3.0)  # the medians alone would say 6 / 3 = 2
    assert paired.reached is True
    assert Ratio(name="below", values=(1.0, 2.0, 9.0), goal=2.5).reached is False
    assert ratio("no goal", SLOW, FAST).reached is None
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio("uneven", SLOW, Figure(name="two", unit="s", values=(1.0, 2.0)))


def test_interleave_alternates_variants() -> None:
    order: list[str] = []

    def variant(name: str, seconds: float):
        def run() -> float:
            order.append(name)
            return seconds + len(order)

        return run

    seconds = interleave({"a": variant("a", 10.0), "b": variant("b", 20.0)}, 3)
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [11.0, 13.0, 15.0], "b": [22.0, 24.0, 26.0]}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.5, "1.50"), (123.4, "123"), (999.6, "1,000"), (12345.6, "12,346"), (0.0, "0.00")],
)
def test_number_shows_three_or_more_digits_without_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_report_write_saves_all_fields_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/somewhere/bin/python", "-m", "bench.weight_sync", "--note", "two words"])
    path = tmp_path / "new folder" / "weight_sync.json"
    make_report().write(path)
    content = json.loads(path.read_text())
    assert content["benchmark"] == "weight_sync"
    assert content["command"] == "python -m bench.weight_sync --note 'two words'"
    assert content["settings"] == {"model": "tiny"}
    assert content["ratios"][0] == {
        "name": "one at a time / in buckets",
        "values": [3.0, 1.0, 3.0],
        "goal": 1.5,
        "median": 3.0,
        "low": 1.0,
        "high": 3.0,
        "reached": True,
    }
    assert content["figures"][1] == {
        "name": "in buckets",
        "unit": "s",
        "values": [2.0, 4.0, 3.0],
        "median": 3.0,
        "low": 2.0,
        "high": 4.0,
    }
    assert content["notes"] == ["two ranks share two cores"]
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["memory_gib"] > 0
    assert content["machine"]["cpu"]
    assert content["machine"]["gpus"] == []
    assert content["versions"]["torch"].startswith("2.13")
    assert content["date"].endswith("+00:00")
    assert content["code"] == measured.code_of("weight_sync")
    assert content["commit"].removesuffix("-dirty") == code_digest.commit().removesuffix("-dirty")


def test_report_print_lists_ratios_first_and_marks_missed_goals(capsys: pytest.CaptureFixture) -> None:
    make_report().print()
    lines = capsys.readouterr().out.splitlines()
    assert "weight_sync: model tiny" in lines[0]
    rows = {
        name: next(line for line in lines if f"│{name} " in line)
        for name in ("one at a time / in buckets", "inverse", "size")
    }
    assert lines.index(rows["one at a time / in buckets"]) < lines.index(rows["inverse"]) < lines.index(rows["size"])
    assert "│   3.00 │  1.00 .. 3.00 │" in rows["one at a time / in buckets"]
    assert ">= 1.5 yes" in rows["one at a time / in buckets"]
    assert ">= 1 NO" in rows["inverse"]
    assert "12,346 │" in rows["size"]
    assert ".." not in rows["size"]  # one value has no spread
    assert lines[-1] == "- two ranks share two cores"


def test_finish_writes_result_by_device_unless_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RESULTS_FOLDER.parent.name == "bench"
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    parser = argument_parser("a benchmark")

    finish(make_report(), parser.parse_args(["--device", "cpu", "--short"]))
    assert list(tmp_path.iterdir()) == []  # a short form never replaces a real result

    finish(make_report(repetitions=3), parser.parse_args(["--device", "cpu", "--repetitions", "7"]))
    finish(make_report(), parser.parse_args(["--device", "cuda"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weight_sync-cuda.json", "weight_sync.json"]
    settings = json.loads((tmp_path / "weight_sync.json").read_text())["settings"]
    assert settings == {"device": "cpu", "repetitions": 3, "model": "tiny"}  # a script knows better than its options

    finish(make_report(), parser.parse_args(["--device", "cpu", "--short", "--output", str(tmp_path / "short.json")]))
    assert json.loads((tmp_path / "short.json").read_text())["settings"]["short"] is True


def test_replace_tables_keeps_handwritten_text(tmp_path: Path) -> None:
    make_report(device="cpu", nodes=[1, 2]).write(tmp_path / "weight_sync.json")
    written = tables.markdown(tmp_path)
    assert "## weight_sync (cpu)" in written
    assert "Settings: model tiny, device cpu." in written  # what is no plain value stays in the JSON
    assert "| **one at a time / in buckets** | **3.00** | 1.00 .. 3.00 | | >= 1.5 yes |" in written
    assert "| size | 12,346 |  | MiB | |" in written
    assert "- two ranks share two cores" in written
    assert "## overlap\n\nNot run yet: `python -m bench.overlap`." in written

    document = f"# Results\n{tables.BEGIN}\nold\n{tables.END}\n## By hand\nkept\n"
    replaced = tables.replace_tables(document, written)
    assert replaced == f"# Results\n{tables.BEGIN}\n\n{written}\n{tables.END}\n## By hand\nkept\n"
    assert tables.replace_tables(replaced, written) == replaced
    with pytest.raises(ValueError, match="one of them is missing"):
        tables.replace_tables("# Results\n", written)
    assert tables.BEGIN in tables.DOCUMENT.read_text()


def test_staleness_of_result_names_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("bench/weight_sync.py", "x = 1\n")
    write("grpo/weights/deep/sync.py", "def f():\n    return 1\n")
    result = {"benchmark": "weight_sync", "commit": "abc-dirty", "code": measured.code_of("weight_sync", tmp_path)}
    assert measured.stamp(result) == "commit abc-dirty"
    assert measured.staleness(result, tmp_path) == ""
    write("grpo/weights/deep/sync.py", '"""What."""\n\n\ndef f():\n    """Why."""\n    return 1  # because\n')
    write("grpo/ops/report.py", "is_no_part = True\n")
    assert measured.staleness(result, tmp_path) == ""
    write("grpo/weights/deep/sync.py", "def f():\n    return 2\n")
    assert measured.staleness(result, tmp_path).startswith("**Stale: changed since this was measured: `grpo/weights`.")
    write("bench/weight_sync_job.py", "y = 1\n")
    assert "`bench/weight_sync*.py`, `grpo/weights`." in measured.staleness(result, tmp_path)
    monkeypatch.setitem(measured.MEASURED, "weight_sync", ("grpo/groups",))  # declared since, or no longer
    assert "`bench/weight_sync*.py`, `grpo/engine`, `grpo/groups`, `grpo/weights`." in measured.staleness(
        result, tmp_path
    )


def test_markdown_marks_stale_and_unrecorded_results(tmp_path: Path) -> None:
    path = tmp_path / "weight_sync.json"
    make_report(device="cpu").write(path)
    content = json.loads(path.read_text())
    assert f", commit {content['commit']}; " in tables.markdown(tmp_path)
    assert "Stale" not in tables.markdown(tmp_path)
    path.write_text(json.dumps(content | {"code": content["code"] | {"grpo/weights": "0123"}}))
    assert "\n\n**Stale: changed since this was measured: `grpo/weights`.**\n\n" in tables.markdown(tmp_path)
    del content["code"], content["commit"]  # as results were written before
    path.write_text(json.dumps(content))
    assert ", commit unknown; " in tables.markdown(tmp_path)
    assert "\n\n**The commit of this result was not recorded" in tables.markdown(tmp_path)


def test_measured_parts_exist_and_include_own_script() -> None:
    for name, parts in measured.MEASURED.items():
        assert all(measured.files_of(part) for part in parts), name
        assert code_digest.ROOT / "bench" / f"{name}.py" in [path for part in parts for path in measured.files_of(part)]


def test_commit_of_changed_tree_is_dirty_and_without_git_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_digest.commit() == "unknown"
    for name in ("code.py", "results/weight_sync.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    (tmp_path / "results" / "weight_sync.json").write_text("2\n")
    clean = code_digest.commit("results")
    assert code_digest.commit() == f"{clean}-dirty"
    assert len(clean) == 8
    (tmp_path / "code.py").write_text("2\n")
    assert code_digest.commit("results") == f"{clean}-dirty"


def test_benchmarks_match_document_and_makefile() -> None:
    scripts = RESULTS_FOLDER.parent.glob("*.py")
    reporting = {path.stem for path in scripts if f'benchmark="{path.stem}"' in path.read_text()}
    assert reporting == set(measured.MEASURED)
    makefile = (RESULTS_FOLDER.parent.parent / "Makefile").read_text()
    run_by_make = makefile.partition("BENCHMARKS := ")[2].partition("\n")[0].split()
    # 31 runs of the demo, and six; ten minutes
    assert reporting - set(run_by_make) == {"learning", "spare_groups", "watch"}
    assert run_by_make[-1] == "scale"  # reads what the others have written


def test_ratios_of_overlap_ragged_match_hand_calculation() -> None:
    ahead = {"weight_sync/total_s": 0.1, "tokens": 64.0}
    found = {1: [ahead | {"step_s": 3.0}], 4: [ahead | {"step_s": 2.0, "tokens": 66.0}]}
    gain, bound, works = overlap_ragged.ratios_of(found, training=[1.6], sampling=[2.0])
    assert (gain.name, gain.values) == ("tokens/s, lookahead 4 / lookahead 1", (pytest.approx(66 / 64 * 3 / 2),))
    assert (bound.values, bound.reached) == ((pytest.approx((1.15 * 2.0 + 0.1) / 2),), True)
    assert works.values == (pytest.approx(0.8),)
    assert [ratio.goal for ratio in (gain, bound, works)] == [1.4, 1.0, None]


# 1 B parameters are 16 Gbit in bf16; a node's 80 completions take 160 GPU-seconds to sample and 80 to train on.
NODE = Node(
    name="by hand",
    gpus=8,
    parameters=10**9,
    completions=80,
    completion_tokens=100,
    sample_s=2.0,
    train_s=1.0,
)
CLUSTER = Cluster(network_gbps=160.0, nvlink_gbps=1600.0, host_gbps=320.0, spread=0.1)


def test_node_local_on_one_node_matches_hand_calculation() -> None:
    on_policy = node_local(NODE, CLUSTER, nodes=1, reserved=4, lookahead=0)
    assert on_policy.generate_s == 160 / 4
    assert on_policy.train_s == 80 / 4
    assert on_policy.sync_s == pytest.approx(0.01)  # 16 Gbit at 1600; the gather brings only 3/4 of it into a rank
    assert on_policy.step_s == pytest.approx(40 + 20 + 0.01)
    assert on_policy.training_idle == pytest.approx(1 - 20 / 60.01)
    assert on_policy.engine_idle == pytest.approx(1 - 40 / 60.01)

    ahead = node_local(NODE, CLUSTER, nodes=1, reserved=4, lookahead=1)
    assert ahead.step_s == pytest.approx(40.01)
    assert ahead.training_idle == pytest.approx(1 - 20 / 40.01)

    slower = replace(NODE, sync_efficiency=0.5, overlap_efficiency=0.8)
    assert node_local(slower, CLUSTER, nodes=1, reserved=4, lookahead=0).step_s == pytest.approx(60.02)
    assert node_local(slower, CLUSTER, nodes=1, reserved=4, lookahead=1).step_s == pytest.approx(40.02 / 0.8)


def test_node_local_on_four_nodes_waits_for_slowest() -> None:
    step = node_local(NODE, CLUSTER, nodes=4, reserved=4, lookahead=0)
    assert slowest_of(4, 0.1) == pytest.approx(1.166511)  # 1 + 0.1 sqrt(2 ln 4)
    assert slowest_of(1, 0.1) == 1.0
    assert step.generate_s == pytest.approx(40 * 1.166511)
    assert step.train_s == 20
    assert step.sync_s == pytest.approx(0.075)  # 3/4 of 16 Gbit at 160
    assert step.engine_idle == pytest.approx(1 - 40 / step.step_s)  # most engines are done before the slowest


def test_best_reserved_matches_hand_calculation() -> None:
    # lookahead 1, the longer of 160 / R and 80 / (8 - R): R = 5 gives 32, R = 4 and R = 6 give 40
    assert best_reserved(NODE, CLUSTER, lookahead=1) == 5
    # lookahead 0, their sum: R = 4 gives 60, R = 5 gives 58.7, R = 6 gives 66.7
    assert best_reserved(NODE, CLUSTER, lookahead=0) == 5
    assert best_reserved(replace(NODE, sample_s=0.1), CLUSTER, lookahead=1) == 1  # 8 and 80 / 7


def test_central_server_matches_hand_calculation() -> None:
    step = central_server(NODE, CLUSTER, nodes=4, reserved=4)
    assert step.engine_gpus == 8
    assert step.generate_s == pytest.approx(4 * 160 / 8 + 320 * 100 * 8 * 8 / 160e9)  # and the completions' way
    assert step.train_s == pytest.approx(4 * 80 / 24)
    assert step.sync_s == pytest.approx(0.1)  # 16 Gbit at 160; the gather's 2/3 of it come meanwhile
    assert step.step_s == pytest.approx(step.generate_s + step.sync_s + step.train_s)
    assert central_server(NODE, CLUSTER, nodes=1, reserved=4).engine_gpus == 4


def test_central_pool_matches_hand_calculation() -> None:
    step = central_pool(NODE, CLUSTER, nodes=2, reserved=4)
    assert step.engine_gpus == 8
    assert step.generate_s == pytest.approx(40, abs=1e-3)
    assert step.train_s == 20
    assert step.sync_s == pytest.approx(0.1)
    assert step.step_s == pytest.approx(40.1, abs=1e-3)


def test_colocated_step_matches_hand_calculation() -> None:
    step = colocated(NODE, CLUSTER, nodes=1)
    assert slowest_of(8, 0.1) == pytest.approx(1.203933)
    assert step.generate_s == pytest.approx(20 * 1.203933)
    assert step.train_s == 10
    assert step.sync_s == pytest.approx(0.00875 + 2 * 0.05)  # 7/8 of 16 Gbit at 1600, and 16 at 320 there and back
    assert step.training_idle == step.engine_idle == pytest.approx(1 - 30 / step.step_s)


def test_simulate_covers_all_layouts_and_draws_chart(tmp_path: Path) -> None:
    steps = simulate(NODE, CLUSTER, node_counts=(1, 2, 64), reserved=None)
    assert len(steps) == 3 * 5
    assert {step.nodes for step in steps} == {1, 2, 64}
    assert all(0 <= share < 1 for step in steps for share in (step.training_idle, step.engine_idle))
    draw({"by hand": steps, "again": steps}, tmp_path / "new folder" / "chart.png")
    assert (tmp_path / "new folder" / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_measured_node_reads_overlap_result(tmp_path: Path) -> None:
    overlap = {
        "settings": {"device": "cpu", "parameters": 5_000, "completions": 32, "completion_tokens": 64},
        "ratios": [
            {"name": "steps/s, lookahead 1 / lookahead 0", "median": 1.6},
            {"name": "bound of a step / step with lookahead 1", "median": 0.93},
        ],
        "figures": [
            {"name": "step, lookahead 0", "median": 10.0},
            {"name": "  waiting for completions", "median": 4.0},
            {"name": "  weight sync", "median": 1.0},
            {"name": "step, lookahead 1", "median": 6.0},
            {"name": "  waiting for completions", "median": 0.5},
            {"name": "  weight sync", "median": 2.0},
        ],
    }
    assert read_result(tmp_path, "overlap") is None
    (tmp_path / "overlap.json").write_text(json.dumps(overlap))
    assert read_result(tmp_path, "overlap") == overlap
    (tmp_path / "overlap-cuda.json").write_text("{}")
    assert read_result(tmp_path, "overlap") == {}  # GPUs first

    assert share_of_bound(overlap) == 0.93
    assert share_of_bound(None) is None
    assert share_of_bound({"ratios": [{"name": "bound / own weight sync", "median": 1.02}]}) == 1.0
    node = measured_node(overlap, NODE)
    assert node.name == "measured (cpu)"
    assert (node.parameters, node.completions, node.completion_tokens) == (5_000, 256, 64)
    assert node.sample_s == 4 / 32
    assert node.train_s == (10 - 4 - 1) / 32
