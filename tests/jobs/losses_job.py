"""Every loss and option of TRL's trainer, computed by TRL's own class and by ours; started by torchrun, as DDP.

`python losses_job.py SETTINGS.json`: `model`, a folder; `out`, where `<rank>.json` is written; `cases`, names of
`loss_cases.CASES`. TRL's trainer has a stand-in for its `VLLMGeneration`, ours one for an engine, and both give the
same completions and log-probabilities. Of each case is written what differs first, and a digest of the gradients.

DDP, because a gradient is whole in `.grad`; under ZeRO-3 TRL's arithmetic is the same, and DeepSpeed's is not ours.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo import GRPOConfig, GRPOTrainer  # first: it imports what others import, in less time

# isort: split
import numpy as np
import torch
import trl
from datasets import Dataset, IterableDataset
from deepspeed.runtime.zero import GatheredParameters
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

from grpo import trainer as own_module
from grpo.engine.messages import Sample
from grpo.groups.process_groups import join_deepspeed, let_gloo_rest
from grpo.place.patches.deepspeed import leave_out_shared_memory_op
from tests.support.engines import Script
from tests.support.loss_cases import BASE, CASES, MAX_TOKENS, Case
from tests.support.tiny_models import VOCAB_SIZE, tiny_config, tiny_tokenizer

settings = json.loads(Path(sys.argv[1]).read_text())
MAX_RELATIVE = 1e-5  # of a gradient, in float32
END = tiny_tokenizer().eos_token_id
NUM_GENERATIONS = BASE["num_generations"]
LONG = 12  # tokens of a prompt that an engine with little space takes
LEARNT = (": advantages", ": completion_mask", ": loss", ": gradient of ", "in the end", "logged loss", "logged reward")
"""Of what is recorded, what does not say which tokens stand in a row that is left out."""
PROMPTS = [f"{row * row}+{7 * row}=" if row % 5 else f"a longer prompt {row}=" for row in range(3, 40)]


def tokens_of(prompt: Sequence[int], copy: int) -> list[int]:
    """What any engine samples for the copy of a prompt; some are cut off."""
    random = np.random.default_rng([copy, *prompt])
    length = int(random.integers(1, MAX_TOKENS + 1))
    tokens = random.integers(2, 40, length).tolist()
    return tokens if length == MAX_TOKENS else [*tokens[:-1], END]


def logprobs_of(prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What it says of them: near the ones of a model that knows nothing, and none of them right."""
    random = np.random.default_rng([*prompt, *tokens])
    return random.normal(-np.log(VOCAB_SIZE), 0.15, len(tokens)).astype(np.float32).tolist()


class StandIn:
    """In the place of TRL's `VLLMGeneration`."""

    refuses = False

    def __init__(self, *, accelerator: Any, **_: Any) -> None:
        self._rank = accelerator.process_index

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], images: None, num_generations: int, profiler: Any) -> tuple:
        first = self._rank * len(prompts)
        answers, logprobs = [], []
        for row, prompt in enumerate(prompts):
            is_refused = self.refuses and len(prompt) >= LONG
            tokens = [END + 1] if is_refused else tokens_of(prompt, (first + row) % num_generations)
            answers.append(tokens)
            logprobs.append([[each] for each in ([float("nan")] if is_refused else logprobs_of(prompt, tokens))])
        return prompts, answers, logprobs, None


def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """By the tokens. TRL's trainer has None where ours leaves a row out."""
    return [
        None if StandIn.refuses and len(prompt) >= LONG else float(sum(ids) % 7)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def reward_model() -> torch.nn.Module:
    torch.manual_seed(1)
    config = tiny_config("qwen2-tied")
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


class Seen(TrainerCallback):
    """All that a training computes, in order."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}
        self.num_batches = 0

    def micro_batch(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        place = f"micro-batch {self.num_batches}"
        self.num_batches += 1
        self.of |= {f"{place}: {name}": value for name, value in sorted(inputs.items())}
        self.of[f"{place}: loss"] = loss.detach().clone()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in trained(kwargs["model"]):
            if hasattr(parameter, "ds_id"):
                continue  # DeepSpeed has cut it up, and made its step
            assert parameter.grad is not None, name
            self.of[f"step {state.global_step}: gradient of {plain_name(name)}"] = parameter.grad.clone()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        for name, value in logs.items():
            if not any(part in name for part in ("time", "runtime", "per_second", "flos")):
                self.of[f"step {state.global_step}: logged {name}"] = value

    def digest_of_gradients(self) -> str:
        digest = hashlib.sha256()
        for name, value in self.of.items():
            if ": gradient of " in name:
                digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    with GatheredParameters([parameter]):  # where DeepSpeed has cut it up
        return parameter.detach().clone()


def plain_name(name: str) -> str:
    """Without what DDP and torch.compile put before it."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def recorded(kind: type, *, sampler: bool) -> type:
    """A subclass that shows what its trainer computes, as a user's would."""

    class Recorded(kind):  # type: ignore[misc, valid-type]
        seen: Seen

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.seen.micro_batch(inputs, loss)
            return loss

    if not sampler:
        return Recorded

    class Curriculum(Recorded):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            """The last rows first."""
            return Backwards(
                self.train_dataset if dataset is None else dataset,
                mini_repeat_count=self.num_generations,
                batch_size=self.args.generation_batch_size // self.num_generations,
                repeat_count=self.num_iterations * self.args.steps_per_generation,
                shuffle=False,
            )

    return Curriculum


class Backwards(RepeatSampler):
    def __iter__(self) -> Any:
        return (self.num_samples - 1 - row for row in super().__iter__())


def train(case: Case, kind: type, config: type, options: dict[str, Any], folder: Path) -> Seen:
    rows: Any = Dataset.from_dict({"prompt": PROMPTS})
    if case.data == "stream":
        rows = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in PROMPTS))
    seen = Seen()
    args = config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=settings.get("deepspeed"),
        **{**BASE, **case.options, **options},
    )
    join_deepspeed(args.deepspeed)  # as our trainer does: beside a file, DeepSpeed counts one rank otherwise
    trainer = recorded(kind, sampler=case.sampler)(
        model=settings["model"],
        reward_funcs=score if case.rewards == "function" else reward_model(),
        reward_processing_classes=None if case.rewards == "function" else tiny_tokenizer(),
        args=args,
        train_dataset=rows,
        callbacks=[seen],
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if case.lora else None,
    )
    trainer.seen = seen
    before = {name: whole(parameter) for name, parameter in trained(trainer.model)}
    try:
        trainer.train()
        for name, parameter in trainer.model.named_parameters():
            seen.of[f"in the end: {plain_name(name)}"] = whole(parameter)
        for name, parameter in trained(trainer.model):
            seen.of[f"in all: change of {plain_name(name)}"] = whole(parameter) - before[name]
    finally:
        if isinstance(trainer, GRPOTrainer):
            trainer.close()
    return seen


def first_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """What TRL's trainer has computed, and ours has not or otherwise; "" where there is nothing."""
    for name, value in theirs.items():
        if name not in ours:
            return f"{name}: only TRL's trainer has it"
        own = ours[name]
        if not isinstance(value, torch.Tensor):
            if own != value and not (own != own and value != value):
                return f"{name}: {value} with TRL's trainer, {own} with ours"
        elif own.shape != value.shape:
            return f"{name}: shape {[*value.shape]} with TRL's trainer, {[*own.shape]} with ours"
        elif not torch.equal(own.nan_to_num(nan=-1e9), value.nan_to_num(nan=-1e9)):
            most = (own.float() - value.float()).abs().max().item()
            return f"{name}: differs by up to {most:.3g}, of {value.float().abs().max().item():.3g}"
    return ""


def difference_but_for_rounding(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """As `first_difference`, of what is learnt: losses, and all parameters' gradients and changes at once."""
    for name in (name for name in theirs if any(part in name for part in ("logged loss", "logged reward"))):
        if abs(ours[name] - theirs[name]) > 1e-5 * max(1.0, abs(theirs[name])):
            return f"{name}: {theirs[name]} with TRL's trainer, {ours[name]} with ours"
    for what in dict.fromkeys(name.partition(" of ")[0] for name in theirs if " of " in name):
        names = [name for name in theirs if name.startswith(f"{what} of ")]
        value, own = (torch.cat([found[name].flatten() for name in names]) for found in (theirs, ours))
        if not torch.dist(own, value) < MAX_RELATIVE * value.norm():
            return f"{what}: differs by {torch.dist(own, value):.3g}, of {value.norm():.3g}"
    return ""


def columns(seen: dict[str, Any]) -> int:
    """Of all micro-batches together."""
    return sum(value.shape[1] for name, value in seen.items() if name.endswith((": completion_ids", ": prompt_ids")))


def script_of(case: Case) -> Script:
    """How our trainer's engine answers."""

    def tokens(sample: Sample, number: int) -> list[int]:
        # A node's completions are counted through, and every batch is of whole groups.
        first, *rest = tokens_of(sample.token_ids.tolist(), sample.ids[number] % NUM_GENERATIONS)
        return [first + (case.spoilt == "token"), *rest]

    def logprobs(sample: Sample, tokens: Sequence[int]) -> list[float]:
        first, *rest = logprobs_of(sample.token_ids.tolist(), tokens)
        return [*rest, first] if case.spoilt == "order" else [first, *rest]

    return Script(tokens_of=tokens, logprobs_of=logprobs, max_model_len=LONG if case.refuses else None)


def compare(case: Case, folder: Path) -> dict[str, Any]:
    StandIn.refuses = case.refuses
    colocated = {"use_vllm": True, "vllm_mode": "colocate"}
    theirs = train(case, trl.GRPOTrainer, trl.GRPOConfig, colocated, folder / "theirs")
    StandIn.refuses = False
    GRPOTrainer.start_engine = script_of(case).start
    computes_no_probabilities = {"vllm_max_logprob_gap": 1e9}
    own = {**computes_no_probabilities, "trim_padding": case.trims, **case.own}
    ours = train(case, GRPOTrainer, GRPOConfig, own, folder / "ours")
    compared = {
        name: value for name, value in theirs.of.items() if not case.refuses or any(part in name for part in LEARNT)
    }
    return {
        "difference": (difference_but_for_rounding if case.trims else first_difference)(compared, ours.of),
        "width": columns(ours.of) / columns(theirs.of),
        "compared": len(compared),
        "gradients": theirs.digest_of_gradients(),
    }


grpo_trainer.VLLMGeneration = StandIn
leave_out_shared_memory_op()  # as our configuration does: it takes a minute to compile
own_module.start_first_host = lambda: None  # a real engine's, beside the imports
found = {}
for name in settings["cases"]:
    began = time.monotonic()
    found[name] = compare(CASES[name], Path(settings["out"]) / name.replace(" ", "_"))
    print(f"case {name}: {time.monotonic() - began:.1f} s, {found[name]}", flush=True)
rank = torch.distributed.get_rank()
(Path(settings["out"]) / f"{rank}.json").write_text(json.dumps(found))
let_gloo_rest()
