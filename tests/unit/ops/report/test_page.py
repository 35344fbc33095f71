"""The page of one run: one small file that asks nobody for anything, and shows texts as texts."""

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.cli import main
from grpo.ops.report.completions import LIMITS, MAX_BYTES, read_completions
from grpo.ops.report.failures import deaths_of, failures_of
from grpo.ops.report.page import setup_of, write_report
from grpo.ops.report.reading import read_run
from grpo.ops.report.symptoms import matching, symptoms
from grpo.record.timeline.records import Span, to_line
from tests.support.long_run import make_long_run
from tests.support.made_runs import MadeRun, make_run
from tests.support.report_pages import NASTY, data_of, with_texts


def test_report_of_10000_steps_on_8_nodes_fits_into_5_mb(tmp_path: Path) -> None:
    folder = make_long_run(tmp_path / "long", 10_000, 8)
    (run,) = write_report([folder], tmp_path / "page.html")
    assert run.step == 10_000
    assert len(run.timeline.spans) > 800_000
    assert run.missing == ()
    page = (tmp_path / "page.html").read_text()
    assert len(page.encode()) < 5e6
    assert "a point stands for up to 20 logs" in page
    assert len(data_of(page)["tables"]["metrics"]["step"]) == 500
    shutil.rmtree(folder)


def test_report_timeline_of_many_nodes_shows_only_16(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", MadeRun(steps=8, nodes=19, fault="slow-node"))
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    data = data_of(page)
    assert len(data["lanes"]["labels"]) == 2 * 16
    assert {"node 0 engines", "node 1 ranks"} <= set(data["lanes"]["labels"])
    assert "3 more nodes are not shown" in page
    assert [line["label"] for line in data["charts"]["tokens"]["lines"]] == ["mean over nodes"]


def test_report_timeline_of_single_instant_shows_its_phase(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    line = to_line(Span(attempt=0, lane="rank 0", phase="mine", begin=5.0, end=5.0, step=0))
    (tmp_path / "timeline" / "node0.jsonl").write_text(line + "\n")
    write_report([tmp_path], tmp_path / "page.html")
    assert data_of((tmp_path / "page.html").read_text())["lanes"]["phases"] == ["mine"]


def test_report_page_loads_nothing_external_and_embeds_library_once(
    run_with: Callable[[str], Path], tmp_path: Path
) -> None:
    write_report([run_with("")], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    around = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)|url\(|@import", around)
    assert "default-src 'none'" in page
    assert page.count("window.vegaEmbed") == 1
    assert not re.search(r"vega-lite/v\d+\.json", json.dumps(data_of(page)))


def test_report_curves_match_metrics_file(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    write_report([run_with("")], tmp_path / "page.html")
    table = data_of((tmp_path / "page.html").read_text())["tables"]["metrics"]
    lines = [json.loads(line) for line in (run_with("") / "metrics.jsonl").read_text().splitlines()]
    assert table["step"] == [line["step"] for line in lines]
    for name in ("reward", "entropy", "kl", "weight_sync/logprob_gap_mean"):
        assert table[name] == pytest.approx([line[name] for line in lines], rel=1e-4)
    assert table["reward_std"] == pytest.approx([line["reward_std"] for line in lines], rel=1e-4)
    middle = len(lines) // 2
    around = lines[middle - 2 : middle + 3]  # 5 of 100 logs
    assert table["reward:smooth"][middle] == pytest.approx(statistics.mean(line["reward"] for line in around), rel=0.1)


def test_report_page_escapes_texts(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with("failed"), tmp_path / "<b>run")
    shutil.rmtree(folder / "completions")
    (folder / "completions").mkdir()
    with_texts(folder, NASTY)
    reported = json.loads((folder / "run.json").read_text())
    reported["attempts"][0]["failure"]["cause"] = NASTY
    reported["attempts"][0]["failure"]["host"] = "half of a pair: \ud800"
    reported["attempts"][1]["arguments"]["run_name"] = NASTY
    (folder / "run.json").write_text(json.dumps(reported))
    (folder / "logs" / "engine-node1-0.attempt-0.log").write_text(NASTY)
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script>") == 3  # Vega, the data, and the page's own
    assert "<b>run" not in page
    assert "<!-- <b>" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 3  # cause, log, argument
    prompt = data_of(page)["completions"]["prompts"][0]
    assert prompt["text"] == NASTY
    assert prompt["groups"][0]["samples"][0][0] == NASTY


def test_read_completions_of_long_texts_cuts_to_max_bytes(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with(""), tmp_path / "run")
    long = "é" * 50_000
    for step in range(1, 60):
        rows = [
            {
                "step": step,
                "prompt_id": f"p{prompt}",
                "prompt": "p",
                "completion": long,
                "reward": float(sample),
            }
            for prompt in range(4)
            for sample in range(20)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "completions" / f"step-{step:08}.parquet")
    browser = read_completions(folder, [])
    assert browser is not None
    text = json.dumps(browser.for_page(), ensure_ascii=False).encode()
    assert len(text) < 1.1 * MAX_BYTES
    rewards = [sample[1] for sample in browser.prompts[0]["groups"][0]["samples"]]
    assert rewards == sorted(rewards, reverse=True)
    assert (rewards[0], rewards[-1]) == (19.0, 0.0)
    assert f"at most {LIMITS[4].samples} samples" in browser.note
    assert "48,000 characters more" in browser.prompts[0]["groups"][0]["samples"][0][0]


def test_read_completions_puts_repeated_prompts_first(run_with: Callable[[str], Path]) -> None:
    browser = read_completions(run_with(""), [])
    assert browser is not None
    assert browser.functions == ("accuracy", "format")
    steps = [[group["step"] for group in prompt["groups"]] for prompt in browser.prompts]
    assert steps[0] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert [len(each) for each in steps] == sorted(map(len, steps), reverse=True)


def test_read_completions_of_unique_prompts_samples_all_steps(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with(""), tmp_path / "run")
    shutil.rmtree(folder / "completions")
    (folder / "completions").mkdir()
    for step in range(1, 41):
        row = {"step": step, "prompt": "p", "completion": "x", "reward": 1.0}
        rows = [row | {"prompt_id": f"{step}-{number}"} for number in range(8)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "completions" / f"step-{step:08}.parquet")
    browser = read_completions(folder, [])
    assert browser is not None
    steps = [prompt["groups"][0]["step"] for prompt in browser.prompts]
    assert len(steps) == LIMITS[0].prompts
    assert (steps[0], steps[-1]) == (1, 40)
    assert max(after - before for before, after in itertools.pairwise(steps)) == 1
    assert f"{LIMITS[0].prompts} prompts at 40 of 40 logged steps" in browser.note


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failures_of_run_hold_record_log_tail_and_symptom(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with("failed"), tmp_path / "run")
    lines = [f"line {number}" for number in range(5000)]
    (folder / "logs" / "engine-node1-0.attempt-0.log").write_text("\n".join(lines))
    (folder / "logs" / "engine-node0-0.attempt-0.log").write_text("another node's")
    (failure,) = failures_of(read_run(folder))
    record = failure.attempt.failure
    assert record is not None
    assert (record.node, record.phase, failure.went_on) == (1, "sync", True)
    assert [tail.name for tail in failure.tails] == ["logs/engine-node1-0.attempt-0.log"]
    assert failure.tails[0].lines.splitlines()[-1] == "line 4999"
    assert len(failure.tails[0].lines.splitlines()) == 40
    assert [symptom.id for symptom in failure.symptoms] == ["GRPO-406"]
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Signal 9, and nobody sent it" in page
    assert "docs/troubleshooting.md, Engines" in page
    assert "Failures (1)" in page


def test_deaths_of_restarted_engine_hold_text_and_symptoms(run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with("restarts"), tmp_path / "run")
    reported = json.loads((folder / "run.json").read_text())
    text = "engine 0 died in phase 'sync' (it was killed [GRPO-406]); it is back after 20 s [GRPO-407]"
    reported["attempts"][0]["restarts"] = [text]
    (folder / "run.json").write_text(json.dumps(reported))
    (death,) = deaths_of(read_run(folder))
    assert death.text == text
    assert [symptom.id for symptom in death.symptoms] == ["GRPO-406", "GRPO-407"]
    assert "Nothing is lost" in death.symptoms[1].help


@pytest.mark.parametrize(
    ("text", "id", "section"),
    [
        ("engine 0: 3 of 8 completions are missing after an hour [GRPO-411]", "GRPO-411", "Engines"),
        ("accuracy hangs [GRPO-607]; it was here:\n  in accuracy", "GRPO-607", "In the middle of training"),
        ("some tensors of the model have no weights [GRPO-503]: a, b", "GRPO-503", "Weight syncs"),
        ("no space on the disk [GRPO-701]", "GRPO-701", "Checkpoints, stop and resume"),
    ],
)
def test_matching_finds_entry_by_error_id(text: str, id: str, section: str) -> None:
    (found,) = matching([text])
    assert (found.id, found.section) == (id, section)
    assert len(found.help) > 40


def test_matching_finds_error_and_cause_once_each() -> None:
    cause = "died too often [GRPO-408]: EngineDied: engine 0 was killed by signal 9 [GRPO-406]"
    assert [each.id for each in matching([cause, f"JobFailed: {cause}"])] == ["GRPO-408", "GRPO-406"]


def test_matching_without_known_id_returns_nothing() -> None:
    assert matching(["level=1 " * 100_000]) == []  # as vLLM's dumps are; in less than the suite's limit
    assert matching(["the engine was killed by signal 9", "a run named GRPO-406", "[GRPO-999]"]) == []


def test_symptoms_hold_help_in_plain_html() -> None:
    assert len(symptoms()) > 40
    for each in symptoms().values():
        assert len(each.help) > 40, each.id
        assert "<" not in re.sub("</?(p|code|b)>", "", each.help), each.id


# -- the command ------------------------------------------------------------------------------------------------------


def test_report_command_replaces_page_in_run_folder_atomically(
    run_with: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_with(""), tmp_path / "run")
    page = folder / "report.html"
    page.write_text("the page before")
    before = page.stat().st_ino
    assert main(["report", str(folder)]) == 0
    assert page.stat().st_ino != before  # another file under the same name
    assert page.read_text().endswith("</html>")
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    assert re.search(r"report\.html: run finished, step 80 \(\d\.\d MB in ", capsys.readouterr().out)


def test_report_watch_continues_until_run_has_ended(
    run_with: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_with(""), tmp_path / "run")
    state = json.loads((folder / "run_state.json").read_text())
    (folder / "run_state.json").write_text(json.dumps({**state, "state": "running"}))
    out = tmp_path / "page.html"
    codes: list[int] = []
    watcher = threading.Thread(
        target=lambda: codes.append(main(["report", str(folder), "--watch", "0.01", "--out", str(out)]))
    )
    watcher.start()
    first = None
    while watcher.is_alive() and (first is None or out.stat().st_ino == first):
        first = first or (out.stat().st_ino if out.exists() else None)
        watcher.join(0.01)
    assert watcher.is_alive()  # it has written twice, and goes on
    requeued = {**state, "state": "stopped", "requeue": True}
    (folder / "run_state.json").write_text(json.dumps(requeued))
    assert not read_run(folder).has_ended
    (folder / "run_state.json").write_text(json.dumps(state))
    watcher.join(60)
    assert codes == [0]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert "run running" in lines[0]
    assert "run finished" in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent"], "absent is no folder: give a run's output_dir"),
        (["run", "run"], "a run is given twice: name each once"),
        (["run", "--watch", "0"], "--watch is 0: give seconds, more than 0"),
        (["run", "--out", "no/page.html"], "no is no folder: make it, or set another --out"),
        ([f"run{number}" for number in range(9)], "9 runs are given: a page holds 1 to 8"),
    ],
)
def test_report_command_with_invalid_arguments_prints_one_line(
    words: list[str],
    said: str,
    run_with: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(run_with(""))
    assert main(["report", *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("grpo report: ")
    assert error.count("\n") == 1


NO_CHARTS = """
import sys
sys.modules["{module}"] = None  # as where it is not installed
from grpo.cli import main
sys.exit(main(["report", "run"]))
"""


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_report_command_without_extra_names_package_to_install(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", NO_CHARTS.format(module=module)], capture_output=True, text=True)
    reported = f"grpo report: {module} is not installed: pip install 'grpo-local[report]'\n"
    assert (done.returncode, done.stderr) == (1, reported)


def test_setup_of_run_puts_non_default_settings_first(run_with: Callable[[str], Path]) -> None:
    run = read_run(run_with(""))
    tables = setup_of(run)
    assert [title for title, _ in tables] == [
        "Settings that differ from the defaults", "Topology", "Software", "All other settings"
    ]  # fmt: skip
    assert [name for name, _ in tables[0][1]] == ["generation_lookahead", "max_steps", "model_name_or_path"]
    assert {"learning_rate", "save_steps"} < {name for name, _ in tables[-1][1]}
    older = replace(run, attempts=tuple(replace(each, changed=None) for each in run.attempts))
    assert [title for title, _ in setup_of(older)] == ["Topology", "Software", "Settings"]
