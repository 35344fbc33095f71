"""README and docs/ say what the code says: commands that tests run, every metric and file."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo import cli
from tests.support.made_up_data import write_shape

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = sorted(ROOT.glob("grpo/**/*.py"))
MAX_README_LINES = 150
ELLIPSIS = "…"

GSM8K = "--config configs/train/gsm8k_qwen2.5_7b.yaml"

# What a test runs, as it stands or with smaller settings: below tests/.
TESTED = {
    "make demo": "multiprocess/test_layouts.py::test_demo_by_torchrun_with_deepspeed_json_evaluates_and_finishes",
    "make coverage": "unit/harness/test_line_coverage.py::test_measure_counts_lines_of_killed_and_forked_processes",
    "make install": "unit/harness/test_install.py::test_constraints_satisfy_pyproject_requirements",
    "make install PYTHON=python3.12": (
        "unit/harness/test_install.py::test_make_environment_for_other_python_or_backend_starts_anew"
    ),
    "grpo init my-run": "multiprocess/test_init.py::test_init_folder_from_wheel_trains_without_ops_package",
    "grpo launch --nodes a,b --doctor --output-dir runs/first --resume auto train.py": (
        "multiprocess/test_launch.py::test_launch_on_several_nodes_starts_one_job"
    ),
    "grpo launch --nodes a,b train.py": "multiprocess/test_launch.py::test_launch_on_several_nodes_starts_one_job",
    "grpo launch --nodes a,b --ranks-per-node 6 train.py": (
        "unit/ops/launch/test_ranks.py::test_ranks_by_node_with_uneven_gpus_follows_each_node"
    ),
    "grpo launch --nodes a,b --ranks-per-node 4,6 train.py": (
        "multiprocess/test_launch.py::test_launch_on_several_nodes_starts_one_job"
    ),
    "grpo launch --hostfile hosts --launcher torchrun train.py": (
        "multiprocess/test_launch.py::test_launch_on_several_nodes_starts_one_job"
    ),
    "grpo launch --output-dir runs/my-run --resume auto train.py": (
        "multiprocess/test_launch.py::test_launch_after_signal_or_stop_file_resumes_at_next_step"
    ),
    "touch runs/my-run/stop": "multiprocess/test_launch.py::test_launch_after_signal_or_stop_file_resumes_at_next_step",
    "python -m grpo.ops.launch.next_attempt OUTPUT_DIR --job 17 --attempt 0": (
        "unit/ops/launch/test_next_attempt.py::test_next_attempt_command_follows_run_state"
    ),
    "accelerate launch --config_file configs/cpu.yaml train.py --generation_lookahead 3": (
        "multiprocess/test_layouts.py::test_sampled_rows_in_any_layout_and_lookahead_are_equal"
    ),
    "sbatch launch/train.sbatch": (
        "multiprocess/test_slurm.py::test_requeued_slurm_job_after_stop_finishes_remaining_steps"
    ),
    f"sbatch --nodes=8 launch/train.sbatch {GSM8K}": (
        "multiprocess/test_slurm.py::test_requeued_slurm_job_after_stop_finishes_remaining_steps"
    ),
    f"sbatch --nodes=8 --time=12:00:00 launch/train.sbatch {GSM8K}": (
        "unit/ops/launch/test_slurm_templates.py::test_slurm_template_starts_grpo_launch_on_each_node"
    ),
    "sbatch launch/train.sbatch my_script.py --its arguments": (
        "unit/ops/launch/test_slurm_templates.py::test_slurm_template_passes_custom_script_and_arguments"
    ),
    "GRPO_SPARE_NODES=1 sbatch --nodes=5 launch/train.sbatch": (
        "multiprocess/test_slurm_spare.py::test_training_after_node_loss_continues_on_spare_node"
    ),
    "srun --ntasks-per-node=1 grpo launch my_script.py": (
        "multiprocess/test_slurm.py::test_srun_of_launch_starts_two_jobs_on_shared_nodes"
    ),
    "launch/local_2node.sh --max_steps 20": (
        "unit/ops/launch/test_local_nodes.py::test_local_2node_splits_gpus_between_nodes"
    ),
    "grpo doctor": "multiprocess/test_missing_gpus.py::test_start_without_visible_gpu_fails_and_names_cause",
    "grpo doctor --nodes a,b,c --output-dir DIR": (
        "multiprocess/test_doctor.py::test_doctor_on_two_nodes_passes_and_agrees_on_verdict"
    ),
    "grpo export runs/gsm8k/checkpoint-300 models/gsm8k-300": (
        "multiprocess/test_export.py::test_export_of_checkpoint_matches_weights_of_ranks"
    ),
    "grpo export runs/gsm8k/checkpoint-300 models/gsm8k-300 --max-shard-size 5GB --dtype bfloat16": (
        "unit/ops/export/test_command.py::test_export_with_shards_and_dtype_casts_and_splits_weights"
    ),
    "accelerate launch --config_file configs/cpu.yaml train.py --eval_strategy steps --eval_steps 50 "
    "--eval_temperature 0.6": "multiprocess/test_evaluation.py::test_eval_sets_use_their_sampling_settings",
    "grpo eval runs/gsm8k/checkpoint-300": (
        "multiprocess/test_evaluation.py::test_grpo_eval_of_checkpoint_matches_run_metrics"
    ),
    "grpo eval runs/gsm8k/checkpoint-300 --set math --json -- --eval_temperature 0": (
        "multiprocess/test_evaluation.py::test_grpo_eval_of_one_set_with_temperature_0_samples_greedily"
    ),
    "accelerate launch --config_file configs/cpu.yaml train.py --spare_groups 8": (
        "multiprocess/test_spare_groups.py::test_spare_groups_over_two_nodes_keep_rows_intact"
    ),
    "grpo report runs/my-run": (
        "unit/ops/report/test_page.py::test_report_command_replaces_page_in_run_folder_atomically"
    ),
    "grpo report runs/my-run --watch 60": (
        "unit/ops/report/test_page.py::test_report_watch_continues_until_run_has_ended"
    ),
    "grpo report runs/a runs/b runs/c --out compared.html": (
        "unit/ops/report/test_compare.py::test_report_of_several_runs_with_one_lacking_metrics_shows_others"
    ),
    "grpo trace runs/my-run": "unit/ops/trace/test_command.py::test_trace_writes_file_beside_run",
    "grpo trace runs/my-run --out my-run.json.gz": (
        "unit/ops/trace/test_command.py::test_trace_with_gz_out_compresses_same_bytes"
    ),
    "grpo reshape runs/my-run/checkpoint-300 --ranks 14": (
        "multiprocess/test_reshape.py::test_reshape_to_one_or_three_ranks_continues_run_of_two"
    ),
    "python -m tools.reward_curve runs/demo/metrics.jsonl docs/demo-reward.svg": (
        "unit/harness/test_reward_curve.py::test_reward_curve_command_prints_rewards_or_error"
    ),
    "python -m tests.line_coverage run tests/unit": (
        "unit/harness/test_line_coverage.py::test_measure_counts_lines_of_killed_and_forked_processes"
    ),
    "python -m tests.line_coverage check": (
        "unit/harness/test_line_coverage.py::test_disagreements_of_matching_table_are_none"
    ),
    "python -m tests.line_coverage table": (
        "unit/harness/test_line_coverage.py::test_read_table_of_written_table_returns_its_rows"
    ),
}

# Run by no test: they run the tests. `test_make_targets_in_pages_exist_in_makefile` holds them against the Makefile.
NOT_RUN = {"make test", "make test-long"}

# What is run below, and how it ends.
RUN_HERE = {
    "grpo launch --help": 0,
    "grpo plan --help": 0,
    "grpo doctor --help": 0,
    "grpo eval --help": 0,
    "grpo export --help": 0,
    "grpo reshape --help": 0,
    "grpo report --help": 0,
    "grpo trace --help": 0,
    "grpo constraints --help": 0,
    f"grpo plan --config_file configs/4node.yaml {GSM8K}": 0,
    "grpo plan --config_file configs/4node.yaml --num_processes 16 --config configs/train/math_qwen2.5_7b.yaml": 0,
    "grpo plan --config_file configs/cpu.yaml --config configs/train/demo.yaml": 0,
    "grpo plan --config_file configs/2gpus.yaml --gpus-per-node 2 --config configs/train/gsm8k_qwen2.5_7b_lora.yaml": 0,
    "grpo plan --num_processes 28 --num_machines 4 --gpus-per-node 8,8,7,8": 1,
    "grpo plan --model Qwen/Qwen2.5-32B-Instruct --num_machines 2 --gpu h100 -- --max_completion_length 2048": 0,
}

NEEDS = "GPUs|a cluster|the hub|PyTorch's index"
BLOCK = re.compile(rf"(?:<!-- needs (?P<needs>{NEEDS}) -->\n)?```bash\n(?P<body>.*?)```", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    page: str
    line: str
    """Without its comment, and with what follows a backslash."""
    is_marked: bool
    """Whether the page says what it needs that the tests do not have."""


def commands() -> Iterator[Command]:
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            for line in block["body"].replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield Command(page=page.name, line=" ".join(words), is_marked=block["needs"] is not None)


def outputs() -> dict[str, str]:
    """What the page shows below a command of `RUN_HERE`."""
    shown = {}
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"```bash\n([^`\n]*)\n```\n(?:(?!```)[^\n]*\n)*```console\n(.*?)```", text, re.S):
            shown[" ".join(shlex.split(found[1], comments=True))] = found[2]
    return shown


def one_line(text: str) -> str:
    return " ".join(text.split())


def words_of(line: str) -> set[str]:
    """What distinguishes a command, apart from paths and values: variables, program, subcommand, and options."""
    variables, command = re.findall(r"^(?:([A-Z_]+)=\S+ )?(.*)$", line)[0]
    program, *rest = shlex.split(re.sub(r"^(sbatch|srun)( --\S+)*", r"\1", command))  # Slurm's options are Slurm's
    words = {variables, Path(program).name} | {word.lstrip("-") for word in rest if word.startswith("--")}
    if program in ("grpo", "make"):
        words.add(rest[0])
    if program == "python":
        words.add(rest[1])  # after -m
    words |= {Path(word).name for word in rest if word.endswith(".sbatch")}
    return {"stop"} if program == "touch" else words - {"", "its", "config", "python"}  # --its stands for any option


def texts_in(file: Path, seen: set[Path]) -> Iterator[str]:
    """Texts and names of arguments in a test's module, in what it imports from tests/, and in its conftest."""
    if file in seen or not file.exists():
        return
    seen.add(file)
    yield from texts_in(file.parent / "conftest.py", seen)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            module = ROOT / (node.module or "").replace(".", "/")
            for found in (module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)):
                yield from texts_in(found, seen)


def test_commands_in_pages_are_marked_or_in_tables() -> None:
    unmarked = {command.line: command.page for command in commands() if not command.is_marked}
    assert unmarked.keys() == TESTED.keys() | RUN_HERE.keys() | NOT_RUN, (
        "the tables here, and the ```bash blocks of README and docs/"
    )


@pytest.mark.parametrize("line", TESTED)
def test_tested_command_has_test_mentioning_all_its_options(line: str) -> None:
    """Whether it runs the command is for its reader; an option that no text of it mentions, it cannot give."""
    file, _, name = TESTED[line].partition("::")
    path = ROOT / "tests" / file
    functions = {each.name for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}
    assert name in functions
    said = "\n".join(texts_in(path, set()))
    assert {word for word in words_of(line) if word not in said} == set()


def test_words_of_returns_distinguishing_words_of_command() -> None:
    assert words_of("grpo reshape runs/x --ranks 14") == {"grpo", "reshape", "ranks"}
    assert words_of(f"GRPO_SPARE_NODES=1 sbatch --nodes=5 launch/train.sbatch {GSM8K}") == {
        "sbatch", "train.sbatch", "GRPO_SPARE_NODES"
    }  # fmt: skip


@pytest.mark.parametrize("line", RUN_HERE)
def test_cheap_command_prints_output_shown_in_page(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = line.split()
    assert name == "grpo"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = write_shape(tmp_path / "model", "32B" if "32B" in line else "7B")  # as if the hub had answered
    monkeypatch.setattr("grpo.ops.plan.planner.within_reach", lambda name, revision: str(model))
    monkeypatch.setenv("COLUMNS", "120")
    try:
        code = cli.main(words)
    except SystemExit as ended:  # after --help
        code = ended.code or 0
    said, complained = capsys.readouterr()
    assert code == RUN_HERE[line], complained
    assert said
    if line in (shown := outputs()):
        assert one_line(shown[line]) in one_line(said), said


def test_console_outputs_in_pages_belong_to_run_commands() -> None:
    assert outputs().keys() <= RUN_HERE.keys()
    assert sum(page.read_text().count("```console") for page in PAGES) == len(outputs())


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_targets_in_pages_exist_in_makefile() -> None:
    for page in PAGES:
        for words in re.findall(r"`(?:[A-Z_]+=\S+ )*make ([^`]*)`", page.read_text()):
            named = [word for word in words.split() if "=" not in word]
            assert set(named) <= targets(), f"{page.name}: make {words}"
    for command in commands():
        if command.line.startswith("make "):
            assert command.line.split()[1] in targets(), command
    makefile = (ROOT / "Makefile").read_text()
    assert "accelerate launch --config_file configs/cpu.yaml train.py\n" in makefile.partition("\ndemo:")[2]


def test_files_modules_and_links_in_pages_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        for said in re.findall(r"`pytest ([^`]*)`", text):
            words = shlex.split(said)
            files = [ROOT / word for word in (words[2:] if words[0] == "-m" else words)]
            assert all(file.exists() for file in files), f"{page.name}: pytest {said}"
            for file in files:  # those alone that are left to another command would be none
                source, marked = file.read_text(), "pytestmark = pytest.mark.long"
                is_long = marked in source or source.count("\ndef test_") == source.count("@pytest.mark.long\n")
                assert words[0] == "-m" or not is_long, f"{page.name}: pytest {said} runs nothing"
        for module in re.findall(r"python -m (?!bench\.NAME)([\w.]+)", text):
            assert importlib.util.find_spec(module), f"{page.name}: python -m {module}"
        for file in re.findall(r"(?:configs|launch)/[\w./]+\.(?:yaml|json|sh|sbatch)", text):
            assert (ROOT / file).exists(), f"{page.name}: {file}"
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_readme_length_stays_within_limit() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


# -- what the code says ------------------------------------------------------------------------------------------------


def texts() -> Iterator[str]:
    """Every text in the package, with `…` where a value is filled in."""
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values]
                yield one_line("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield one_line(node.value)


def test_metrics_table_lists_every_logged_metric() -> None:
    areas = "rollout|engine|weight_sync|startup|run|sampling"
    ours = re.compile(rf"(?:{areas})/[a-z_/]+")
    logged = {text for text in texts() if ours.fullmatch(text)}
    section = (ROOT / "docs" / "metrics.md").read_text().partition("| metric |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in ours.findall(row)} == logged
    assert len(logged) > 20
