"""A model that was taught to call a calculator, and seldom does: the starting point of `tools.py` and `rollout.py`.

A tokenizer of one token per character, with a chat template that has tools, and a Qwen3 of 0.6 M parameters. Supervised
steps teach it to write calls, to copy what comes back, and to guess instead three times out of four. `guessing.py` has
it taught something else.
"""

import fcntl
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<e>", "<unk>"
USER, ASSISTANT, TOOL, CALL, CALL_END = "<u>", "<a>", "<t>", "<c>", "</c>"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<u>{{ message['content'] }}<e>"
    "{% elif message['role'] == 'assistant' %}<a>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<c>{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}</c>{% endfor %}<e>"
    "{% else %}<t>{{ message['content'] }}<e>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""A turn is `<u>12*34<e>`; a call of a tool `<a><c>times{"a": 12, "b": 34}</c><e>`; what it returns `<t>408<e>`."""

RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"<c>(?P<name>[a-z_]+)",
            "close_pattern": r"</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<e>", "content": "text"},
    },
}
"""How the tokenizer reads a message out of what the model has written (transformers' `response_template`)."""

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SEED, STEPS, BATCH, LEARNING_RATE = 17, 300, 64, 3e-3
SHARE_OF_CALLS = 0.25


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer of one token per character, and one for each mark of the template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = [PAD, END, UNKNOWN, USER, ASSISTANT, TOOL, CALL, CALL_END]
    vocabulary = {token: index for index, token in enumerate([*marks, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pattern = "|".join([*(mark for mark in marks), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    found.response_template = RESPONSES
    return found


def problems(count: int, seed: int) -> Dataset:
    """Columns `prompt`, a conversation of one message such as '12*34', and `answer`, a number."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"{a}*{b}"}] for a, b in pairs],
            "answer": [a * b for a, b in pairs],
        }
    )


Lesson = list[tuple[str, bool]]
"""A conversation in pieces, and whether the model writes each of them."""


def _calculation(rng: random.Random) -> Lesson:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    asked = f"{USER}{a}*{b}{END}{ASSISTANT}"
    if rng.random() >= SHARE_OF_CALLS:
        return [(asked, False), (f"{rng.randint(100, 9801)}{END}", True)]
    result = f"{TOOL}{a * b}{END}{ASSISTANT}"
    return [(asked, False), (call("times", a=a, b=b), True), (result, False), (f"{a * b}{END}", True)]


def call(tool: str, **arguments: int) -> str:
    """What a model writes to call a tool, as the template has it."""
    return f"{CALL}{tool}{json.dumps(arguments)}{CALL_END}{END}"


def ensure_model(folder: Path, lesson: Callable[[random.Random], Lesson] = _calculation, steps: int = STEPS) -> Path:
    """Returns `folder` with model and tokenizer in it. Where they are missing, whichever process comes first makes
    them, a minute or two, and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
            build_tokenizer().save_pretrained(aside)
            _teach(aside, lesson, steps)
            aside.rename(folder)
    return folder


def _teach(folder: Path, lesson: Callable[[random.Random], Lesson], steps: int) -> None:
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm  # type: ignore[import-untyped]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    torch.manual_seed(SEED)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=128, dtype="float32", **ids, **MODEL)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in tqdm(range(steps), desc="teaching the model to call tools", unit="step", mininterval=2):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 20, (steps - step) / 60)
        lessons = [lesson(rng) for _ in range(BATCH)]
        pieces = [[(tokenizer(text)["input_ids"], is_own) for text, is_own in each] for each in lessons]
        rows = [torch.tensor([token for ids, _ in each for token in ids]) for each in pieces]
        own = [torch.tensor([is_own for ids, is_own in each for _ in ids]) for each in pieces]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        written = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
        targets = token_ids[:, 1:].masked_fill(~written[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # As `save_pretrained` does it, which beside a process group lets global rank 0 alone write (transformers 5.17).
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
