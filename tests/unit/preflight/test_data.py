"""Which prompts are too long, found before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from grpo import GRPOConfig
from grpo.preflight import data
from grpo.preflight.data import check_prompt_lengths, prompt_ids

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}="


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def args(tmp_path: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, vllm_max_model_length=90, max_completion_length=10,
        report_to="none",
    )  # fmt: skip


def prompts_of(lengths: list[int]) -> list[str]:
    return ["1" * length for length in lengths]


def test_check_prompt_lengths_counts_every_stored_prompt(tokenizer: Any, args: GRPOConfig) -> None:
    lengths = [3, 89, 30, 95, 4, 90]
    check_prompt_lengths(Dataset.from_dict({"prompt": prompts_of(lengths[:3])}), tokenizer, args)
    with pytest.raises(ValueError, match=r"2 of 6 prompts .* row 3 has 95 .* longest 95.*GRPO-208.*set it to 105 "):
        check_prompt_lengths(Dataset.from_dict({"prompt": prompts_of(lengths)}), tokenizer, args)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts_of([3, 88, 89])]
    check_prompt_lengths(Dataset.from_dict({"prompt": chats[:2]}), tokenizer, args)
    with pytest.raises(ValueError, match=r"1 of 3 prompts .* that of row 2 has 90 tokens"):
        check_prompt_lengths(Dataset.from_dict({"prompt": chats}), tokenizer, args)


def test_prompt_ids_without_space_for_one_token_raises(tokenizer: Any, args: GRPOConfig) -> None:
    assert len(prompt_ids({"prompt": "1" * 89}, tokenizer, args)) == 89
    with pytest.raises(ValueError, match=r"has 90 tokens, but vllm_max_model_length, .* is 90: set .* to 100 or more"):
        prompt_ids({"prompt": "1" * 90}, tokenizer, args)


def test_prompt_ids_with_template_dropping_text_raises(tokenizer: Any, args: GRPOConfig) -> None:
    """As LLaVA's does: in a string no part has a type."""
    tokenizer.chat_template = (
        "{% for m in messages %}USER: {% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "1+1="}]
    assert prompt_ids({"prompt": [{"role": "user", "content": parts}]}, tokenizer, args)
    with pytest.raises(
        ValueError, match=r"leaves out what the first prompt says, .*GRPO-215.*make each content a list"
    ):
        prompt_ids({"prompt": [{"role": "user", "content": "1+1="}]}, tokenizer, args)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_first_row_with_video_or_audio_raises(kind: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "1+1="}]}]}]
    with pytest.raises(
        ValueError, match=rf"has a part of type '{kind}' \[GRPO-214\]: local mode takes text and images"
    ):
        data.first_row(rows)


def times(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: one.
        b: another.
    """
    return a * b


def test_prompt_lengths_include_tools(tokenizer: Any, args: GRPOConfig) -> None:
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name * 10 }}{% endfor %}" + TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": "1" * length}]} for length in (3, 60)]
    assert len(prompt_ids(rows[0], tokenizer, args, [times])) == 3 + 1 + 10 * len("times")
    check_prompt_lengths(Dataset.from_list(rows), tokenizer, args)
    with pytest.raises(ValueError, match=r"1 of 2 prompts .* row 1 has 111 tokens"):
        check_prompt_lengths(Dataset.from_list(rows), tokenizer, args, [times])


def test_check_prompt_lengths_tokenizes_long_candidates_alone(
    tokenizer: Any, args: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(data, "prompt_tokens", lambda prompt, *_: seen.append(prompt) or [])
    check_prompt_lengths(Dataset.from_dict({"prompt": prompts_of([3, 25, 26, 60])}), tokenizer, args)
    assert [len(prompt) for prompt in seen] == [26, 60]
    seen.clear()
    monkeypatch.setattr(data, "LONG_PROMPTS_S", 0.0)
    check_prompt_lengths(Dataset.from_dict({"prompt": prompts_of([60])}), tokenizer, args)
    assert not seen


def test_check_prompt_lengths_of_streams_samples_first_rows(
    tokenizer: Any, args: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SAMPLED_ROWS", 2)
    late, early = (Dataset.from_dict({"prompt": prompts_of(lengths)}) for lengths in ([3, 4, 99], [3, 99, 4]))
    for made in (lambda rows: rows.to_iterable_dataset(), lambda rows: rows.with_transform(lambda batch: batch)):
        check_prompt_lengths(made(late), tokenizer, args)
        with pytest.raises(ValueError, match="1 of 2 prompts"):
            check_prompt_lengths(made(early), tokenizer, args)
