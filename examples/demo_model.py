"""Makes the demo's model: the one in `grpo/ops/train/demo_model/` comes from this script.

    MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default python -m examples.demo_model grpo/ops/train/demo_model

A character tokenizer and a Qwen3 of 0.6 M parameters, warmed up by supervised steps until about 40 % of its sampled
answers are right. How much GRPO can teach it from there differs by the last bits of the warm-up's sums: with the
kernels of one processor the demo's reward rises by 0.2, with those of another one by half of that. So the package holds
weights that were looked at, and the two variables choose kernels that every x86 processor has.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo.ops.train import demo

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+="
PROMPT_TOKENS = 6  # "12+34="
ANSWER_TOKENS = 4  # three digits at most, then EOS
SHAPE: dict[str, Any] = {
    # vLLM pads a vocabulary to multiples of 64. With exactly 64 rows both halves of a tensor-parallel pair hold
    # real ones; rows beyond the 14 tokens are unused.
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # two: tensor parallel 2 gets one each
    "head_dim": 32,  # the smallest that vLLM's CPU attention knows
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
RISE_STEPS = 20
MAX_STEPS = 600
# Exact match is the mean probability of the whole right answer: what samples at temperature 1 come to. The full rate is
# kept until the first figure; then it falls, because at the full rate every step moves the result, and the warm-up ends
# at the second.
FALL_AT, FALL_STEPS, FALL_TO = 0.20, 10, 0.1
TARGET, TARGET_WINDOW_STEPS = 0.395, 8


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, loadable with `AutoTokenizer` from where it is saved."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def warm_up(tokenizer: PreTrainedTokenizerFast, *, seed: int, max_steps: int) -> Qwen3ForCausalLM:
    """Supervised steps on the answers, on the CPU in float32, until `TARGET`."""
    torch.set_num_threads(1)  # a second one saves a tenth of the time, and changes the sums
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    tokens = encode(tokenizer, demo.demo_pairs()[0])
    recent: list[float] = []
    scale, falling = 0.0, False
    for step in (bar := tqdm(range(1, max_steps + 1), unit="step")):
        scale = max(FALL_TO, scale - (1 - FALL_TO) / FALL_STEPS) if falling else min(1.0, step / RISE_STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * scale
        batch = tokens[torch.randint(len(tokens), (BATCH_SIZE,))]
        logprobs, lengths = answer_logprobs(model, batch, tokenizer.pad_token_id)
        (-logprobs.sum() / lengths.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent, logprobs.detach().exp().mean().item()][-TARGET_WINDOW_STEPS:]
        exact_match = sum(recent) / len(recent)
        bar.set_postfix_str(f"exact match {exact_match:.2f}")
        falling = falling or exact_match >= FALL_AT
        if exact_match >= TARGET:
            break
    return model


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """[len(pairs), PROMPT_TOKENS + ANSWER_TOKENS] token ids of prompt, answer and EOS, padded on the right."""
    rows = torch.full((len(pairs), PROMPT_TOKENS + ANSWER_TOKENS), tokenizer.pad_token_id)
    for row, (a, b) in zip(rows, pairs, strict=True):
        ids = tokenizer(f"{a}+{b}={a + b}{EOS}", add_special_tokens=False)["input_ids"]
        row[: len(ids)] = torch.tensor(ids)
    return rows


def answer_logprobs(
    model: Qwen3ForCausalLM, batch: torch.Tensor, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] log-probability of each row's whole answer (EOS included), and [B] its number of tokens."""
    targets = batch[:, PROMPT_TOKENS:]
    logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=ANSWER_TOKENS).logits
    mask = targets != pad_token_id
    gathered = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (gathered * mask).sum(-1), mask.sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=MAX_STEPS)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    model = warm_up(tokenizer, seed=args.seed, max_steps=args.max_steps)
    model.half().save_pretrained(args.folder)  # half the size in the package
    model.config.dtype = "float32"  # what it is to be loaded in
    model.config.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
