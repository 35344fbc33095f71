"""`grpo launch`, before it becomes a launcher and after it."""

import argparse
from pathlib import Path

from grpo.launch import command
from grpo.launch.line import Script


def read(*words: str) -> tuple[argparse.Namespace, Script]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    return args, Script(name=args.script, arguments=tuple(args.arguments), is_module=args.module)


def test_flags_count_beside_a_file_that_only_the_script_can_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\n")
    flags = ["--config", str(tmp_path / "mine.toml"), "--vllm_reserved_gpus", "2", "--use_cpu"]
    asked, wishes, is_readable = command._asked(*read("mine.py", *flags), file={})
    assert (asked.reserved_gpus, wishes.use_cpu, is_readable) == (2, True, False)
