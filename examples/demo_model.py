"""The starting point of the demo task: `train.py` builds it where no model is named.

A character tokenizer and a Qwen3 of 0.6 M parameters, warmed up by supervised steps until about 40 % of its sampled
answers are right. GRPO has the rest to do.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.ops.train import demo

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+="
PROMPT_TOKENS = 6  # "12+34="
ANSWER_TOKENS = 4  # three digits at most, then EOS

RECIPE: dict[str, Any] = demo.RECIPE | {
    "batch_size": 128,
    "learning_rate": 3e-3,
    "rise_steps": 20,  # linear rise of the learning rate
    "max_steps": 600,
    # Exact match is the mean probability of the whole right answer: what samples at temperature 1 come to. The full
    # rate is kept until the first figure; then it falls, because at the full rate every step moves the result, and
    # the warm-up ends at the second. A fixed number of steps would end elsewhere on every kind of processor.
    "fall_at_exact_match": 0.20,
    "fall_steps": 10,
    "fall_to": 0.1,
    "target_exact_match": 0.395,
    "target_window_steps": 8,
}

_RECIPE_FILE = "recipe.json"
_POLL_S = 0.2


def ensure_demo_model(
    folder: Path, *, is_local_main: bool = True, max_steps: int | None = None, timeout_s: float = 900.0
) -> Path:
    """Returns `folder` with the warmed-up model and its tokenizer in it, building it where it is missing.

    Called by every rank, not collective: the local mains build, each in a private folder beside `folder`, and the first
    one renames its own into place; the others poll the file system. A folder of another recipe is replaced.

    Raises `TimeoutError` after `timeout_s` on a rank that waits, `ValueError` if `folder` holds something else.
    """
    recipe = RECIPE if max_steps is None else RECIPE | {"max_steps": max_steps}
    if _is_built(folder, recipe):
        return folder
    if is_local_main:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the run's, which is its owner's alone
        private = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
        private.mkdir()
        try:
            _build(private, recipe)
            _move_into_place(private, folder, recipe)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        return folder
    deadline = time.monotonic() + timeout_s
    while not _is_built(folder, recipe):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the demo model did not appear in {folder} within {timeout_s:.0f} s: the node's local main process "
                "builds it there; its output says what it is doing"
            )
        time.sleep(_POLL_S)
    return folder


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer of one token per character, loadable with `AutoTokenizer` from where it is saved."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=RECIPE["model"]["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def _fingerprint(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _is_built(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether `folder` holds the model of `recipe`. Raises `ValueError` if it holds something that is not ours."""
    try:
        stored = json.loads((folder / _RECIPE_FILE).read_text())
    except FileNotFoundError:
        # Looked at after the miss: a complete folder may have been renamed into place in between.
        if folder.is_dir() and any(folder.iterdir()) and not (folder / _RECIPE_FILE).exists():
            raise ValueError(
                f"{folder} is not empty and holds no {_RECIPE_FILE}: it is no demo model, and it is not overwritten; "
                "move it away or choose another output_dir"
            ) from None
        return False
    return stored["fingerprint"] == _fingerprint(recipe)


def _move_into_place(private: Path, folder: Path, recipe: dict[str, Any]) -> None:
    """Renames `private` to `folder`. If another process was faster with the same recipe, its result stays."""
    while not _is_built(folder, recipe):
        try:
            os.rename(private, folder)  # fails on a folder that is not empty
        except OSError:
            if not folder.is_dir():
                raise
            outdated = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
            try:
                if not _is_built(folder, recipe):
                    os.rename(folder, outdated)
            except FileNotFoundError:
                pass  # another process has just moved it aside
            finally:
                shutil.rmtree(outdated, ignore_errors=True)
        else:
            return


def _build(folder: Path, recipe: dict[str, Any]) -> None:
    """Warms a new model up and saves it with its tokenizer into `folder`, the recipe last."""
    tokenizer = build_tokenizer()
    model, steps, exact_match = _warm_up(tokenizer, recipe)
    _save_weights(model, folder)
    tokenizer.save_pretrained(folder)
    record = {"fingerprint": _fingerprint(recipe), "recipe": recipe, "steps": steps, "exact_match": exact_match}
    (folder / _RECIPE_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _save_weights(model: "Qwen3ForCausalLM", folder: Path) -> None:
    """As `save_pretrained`, which beside a process group lets global rank 0 alone write (transformers 5.17)."""
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied to the embeddings
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _warm_up(tokenizer: "PreTrainedTokenizerFast", recipe: dict[str, Any]) -> tuple["Qwen3ForCausalLM", int, float]:
    """Supervised steps on the answers, on the CPU in float32. Returns the model, its steps and its exact match."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    tokens = _encode(tokenizer, demo.demo_pairs()[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one saves a tenth of the time, and changes the sums
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe["seed"])
            model = _new_model(tokenizer, recipe)
            optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], weight_decay=0.0)
            recent: list[float] = []
            with tqdm(total=recipe["max_steps"], desc="warming the demo model up", unit="step") as bar:
                scale, falling = 0.0, False
                for step in range(1, recipe["max_steps"] + 1):
                    if falling:
                        scale = max(recipe["fall_to"], scale - (1 - recipe["fall_to"]) / recipe["fall_steps"])
                    else:
                        scale = min(1.0, step / recipe["rise_steps"])
                    optimizer.param_groups[0]["lr"] = recipe["learning_rate"] * scale
                    batch = tokens[torch.randint(len(tokens), (recipe["batch_size"],))]
                    logprobs, lengths = _answer_logprobs(model, batch, tokenizer.pad_token_id)
                    (-logprobs.sum() / lengths.sum()).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    recent = [*recent, logprobs.detach().exp().mean().item()][-recipe["target_window_steps"] :]
                    exact_match = sum(recent) / len(recent)
                    bar.update()
                    bar.set_postfix_str(f"exact match {exact_match:.2f}")
                    falling = falling or exact_match >= recipe["fall_at_exact_match"]
                    if exact_match >= recipe["target_exact_match"]:
                        break
    finally:
        torch.set_num_threads(threads)
    return model, step, exact_match


def _new_model(tokenizer: "PreTrainedTokenizerFast", recipe: dict[str, Any]) -> "Qwen3ForCausalLM":
    """With random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **recipe["model"],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


def _encode(tokenizer: "PreTrainedTokenizerFast", pairs: list[tuple[int, int]]) -> "torch.Tensor":
    """[len(pairs), PROMPT_TOKENS + ANSWER_TOKENS] token ids of prompt, answer and EOS, padded on the right."""
    import torch

    rows = torch.full((len(pairs), PROMPT_TOKENS + ANSWER_TOKENS), tokenizer.pad_token_id)
    for row, (a, b) in zip(rows, pairs, strict=True):
        ids = tokenizer(f"{a}+{b}={a + b}{EOS}", add_special_tokens=False)["input_ids"]
        row[: len(ids)] = torch.tensor(ids)
    return rows


def _answer_logprobs(
    model: "Qwen3ForCausalLM", batch: "torch.Tensor", pad_token_id: int
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """[B] log-probability of each row's whole answer (EOS included), and [B] its number of tokens."""
    import torch

    targets = batch[:, PROMPT_TOKENS:]
    logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=ANSWER_TOKENS).logits
    mask = targets != pad_token_id
    gathered = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (gathered * mask).sum(-1), mask.sum(-1)
