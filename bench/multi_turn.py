"""Episodes with tools, in the main thread and in threads, against TRL's own tool loop, in one run.

Trainers of the same model, each with an engine that is up all the time; one works at a time. The model is random;
how many turns an episode has, and how long each call of its tool takes, is drawn once and the same for all: few
have many turns. Every turn ends where the model happens to say one of some tokens. TRL's loop (1.16) runs the calls of
a turn one after the other and then samples all rows that go on; its `generate` is ours. So does the main thread by
default, but while other rows are sampled; with `max_tool_threads` calls run side by side.

    python -m bench.multi_turn [--rows 32]
    python -m bench.multi_turn --lookahead 1     # while the ranks train: bench/multi_turn_ahead.py
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from examples.calculator_model import END, TOOL, build_tokenizer
from grpo import GRPOConfig, GRPOTrainer

GOAL, GOAL_IN_MAIN = 1.5, 0.9
MAX_TURNS = 6
MAX_TOOL_S = 0.4
STOPS = 6  # of 128 tokens: a turn has about 20
TOKENS = 600  # an episode stays far below
RESULT = "done"  # a random model says TOOL by itself, but not this behind it


class WithTRLsLoop(GRPOTrainer):
    """On the same engine, whose every call is all rows' together."""

    _tool_call_loop = trl.GRPOTrainer._tool_call_loop

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        assert self._local is not None
        self._local.rollouts = None


class Play:
    """Who says what when: the same for all."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = random.Random(seed)
        weights = [1 / turns for turns in range(1, MAX_TURNS + 1)]
        self.turns = rng.choices(range(1, MAX_TURNS + 1), weights, k=rows)
        self.delays_s = [[rng.uniform(0, MAX_TOOL_S) for _ in range(turns - 1)] for turns in self.turns]
        self.tokenizer = build_tokenizer()

    def prompts(self) -> list[list[dict[str, str]]]:
        return [[{"role": "user", "content": f"row {row}"}] for row in range(len(self.turns))]

    def parse(self, tokenizer: Any, ids: list[int], prefix: list[int] | None = None, tools: Any = None) -> dict:
        """In the place of TRL's parser: a call, as long as the row is to go on."""
        said = self.tokenizer.decode(prefix)
        row, done = int(said.partition("row ")[2].partition(END)[0]), said.count(f"{TOOL}{RESULT}")
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if done < self.turns[row] - 1:
            function = {"name": "work", "arguments": {"row": row, "turn": done}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    def work(self, row: int, turn: int) -> str:
        """Work.

        Args:
            row: whose
            turn: which
        """
        time.sleep(self.delays_s[row][turn])
        return RESULT

    @contextmanager
    def on(self) -> Iterator[None]:
        with (
            mock.patch("trl.trainer.grpo_trainer.parse_response", self.parse),
            mock.patch("grpo.seam.episodes.parse_response", self.parse),
        ):
            yield


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=32, help="episodes of a batch")
    parser.add_argument("--lookahead", type=int, default=0, help="batches of episodes ahead: bench/multi_turn_ahead.py")
    options = parser.parse_args()
    if options.lookahead:
        from bench import multi_turn_ahead

        return multi_turn_ahead.compare(options)
    if options.short:
        options.rows, options.repetitions = 8, 1
    with tempfile.TemporaryDirectory(prefix="bench-multi_turn-") as folder:
        finish(measure(options, Path(folder)), options)


def save_model(folder: Path) -> Path:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    settings = Qwen3Config(vocab_size=128, max_position_embeddings=2048, dtype="float32", **shape, **heads, **ids)
    Qwen3ForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(
    kind: type[GRPOTrainer], play: Play, model: Path, folder: Path, options: Any, **config: Any
) -> GRPOTrainer:
    on_cpu = options.device == "cpu"
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=on_cpu,
        bf16=False,
        per_device_train_batch_size=options.rows,
        num_generations=options.rows,
        max_completion_length=TOKENS,
        vllm_max_model_length=TOKENS + 100,
        generation_kwargs={"stop_token_ids": [*range(120, 120 + STOPS)]},
        vllm_gpu_memory_utilization=0.4,  # one GPU may hold both engines
        vllm_engine_kwargs={"enforce_eager": True} if on_cpu else None,
        report_to="none",
        check_rewards=False,
        disable_tqdm=True,
        **config,
    )
    work = play.work.__get__(play)

    def tool(row: int, turn: int) -> str:
        return work(row, turn)

    tool.__name__, tool.__doc__ = "work", Play.work.__doc__
    return kind(
        model=str(model),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": play.prompts()}),
        tools=[tool],
    )


def seconds_of(trainer: Any, play: Play, idle: list[float]) -> float:
    """Of one batch of episodes; the weights are there."""
    rows = len(play.turns)
    trainer._sync_tool_dicts = [{"work": trainer.tools[0]}] * rows
    trainer._async_tool_dicts = [{}] * rows
    pool = trainer._local._serving.pool
    take, taken = pool.accounts.take_idle_s, []
    take()

    def note() -> float:  # every report takes it
        taken.append(take())
        return taken[-1]

    with mock.patch.object(pool.accounts, "take_idle_s", note):
        begun = time.perf_counter()
        completions = trainer._generate(play.prompts())[3]
        seconds = time.perf_counter() - begun
    idle.append((sum(taken) + take()) / seconds)
    turns = [sum(message["role"] == "assistant" for message in said) for said in completions]
    assert turns == play.turns, json.dumps([turns, play.turns])
    return seconds


def measure(options: Any, folder: Path) -> Report:
    play = Play(options.rows, seed=7)
    model = save_model(folder / "model")
    kinds: dict[str, tuple[type[GRPOTrainer], dict[str, Any]]] = {
        "in threads": (GRPOTrainer, {"max_tool_threads": options.rows}),
        "in the main thread": (GRPOTrainer, {}),
        "TRL's loop": (WithTRLsLoop, {}),
    }
    idle: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        stack.enter_context(play.on())
        variants = {}
        for name, (kind, config) in kinds.items():
            trainer: Any = make_trainer(kind, play, model, folder / name, options, **config)
            stack.callback(trainer.close)
            trainer.model.train()
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
            variants[name] = partial(seconds_of, trainer, play, idle[name])
            variants[name]()  # warm
            idle[name].clear()
        seconds = interleave(variants, options.repetitions)
    figures = {name: Figure(name=name, unit="s", values=tuple(values)) for name, values in seconds.items()}
    shares = [
        Figure(name=f"{name}: the engine has nothing to do", unit="%", values=tuple(100 * value for value in values))
        for name, values in idle.items()
    ]
    longest = max(sum(delays) for delays in play.delays_s)
    return Report(
        benchmark="multi_turn",
        settings={
            "multi_turn": options.rows,
            "turns": sum(play.turns),
            "most turns": max(play.turns),
            "a tool's time, s": f"0 to {MAX_TOOL_S}",
            "tools' time of the longest episode, s": round(longest, 2),
            "tools' time of all, s": round(sum(map(sum, play.delays_s)), 2),
        },
        ratios=(
            ratio("TRL's loop / in threads", figures["TRL's loop"], figures["in threads"], GOAL),
            ratio(
                "TRL's loop / in the main thread", figures["TRL's loop"], figures["in the main thread"], GOAL_IN_MAIN
            ),
        ),
        figures=(*figures.values(), *shares),
        notes=(
            "No batch can be faster than the tools of its longest episode.",
            "In the main thread none can be faster than the tools of all.",
        ),
    )


if __name__ == "__main__":
    main()
