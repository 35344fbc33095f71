"""Which of transformers' log levels counts for a rank, and that a wrong word in GRPO_LOG is refused."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo import GRPOConfig


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("grpo", "grpo.weights")]
    before = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


def config(tmp_path: Path, **options: object) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_vllm=False, use_cpu=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, logging.INFO),
        ({"log_level": "warning"}, logging.WARNING),
        ({"log_level": "debug"}, logging.DEBUG),
        ({"log_level_replica": "error"}, logging.INFO),  # this is no replica
    ],
)
def test_log_level_when_set_decides_grpo_logger_level(options: dict[str, str], level: int, tmp_path: Path) -> None:
    logging.getLogger("grpo").setLevel(logging.INFO)
    config(tmp_path, **options)
    assert logging.getLogger("grpo").level == level


def test_log_level_warning_hides_info_on_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, log_level="warning")
    logging.getLogger("grpo.record.progress").info("step 1/2")
    logging.getLogger("grpo.local_vllm").warning("one completion was left out")
    assert capsys.readouterr().out == "[grpo] one completion was left out\n"


def test_grpo_log_package_keeps_debug_under_log_level_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LOG", "weights")
    config(tmp_path, log_level="error")
    assert logging.getLogger("grpo.weights.sync").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("grpo.rollout.pool").isEnabledFor(logging.WARNING)


def test_grpo_log_with_unknown_word_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LOG", "wieghts")
    with pytest.raises(ValueError, match="GRPO_LOG is 'wieghts'"):
        config(tmp_path)


def test_own_log_level_on_replica_is_log_level_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo.config.options import own_log_level

    args = config(tmp_path, log_level="debug", log_level_replica="error")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert own_log_level(args) == logging.ERROR
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert own_log_level(args) == logging.DEBUG  # the first of its node (log_on_each_node)
    args.log_on_each_node = False
    assert own_log_level(args) == logging.ERROR
