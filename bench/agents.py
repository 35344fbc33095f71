"""A step whose rows are agents, with and without many idle connections to the door, in one run.

One trainer on one engine; steps take turns: before every other one a process opens the connections, and after it closes
them; before each of the others it opens none. Each agent asks three times by the `openai` package, for as many tokens
each time. What opens and closes is not part of a step.

    python -m bench.agents [--connections 1000]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datasets import Dataset
from openai import AsyncOpenAI
from transformers import TrainerCallback

from bench.multi_turn import save_model
from bench.report import Figure, Report, argument_parser, finish, ratio
from grpo import GRPOConfig, GRPOTrainer, agents
from grpo.rollout.agents.door import Door

GOAL = 1 / 1.05
TURNS, TURN_TOKENS = 3, 24
TOKENS = 300  # an episode stays far below
NUM_WARM = 2  # steps: the door is there after the first one
HOLD = """
import socket, sys, time
number, port = int(sys.argv[1]), int(sys.argv[2])
held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(number)]
time.sleep(2)  # the door has accepted them all
print("held", flush=True)
sys.stdin.read()
"""


class Agents:
    """Their clients are one, as each loads certificates anew."""

    def __init__(self) -> None:
        self.port: int | None = None
        self._client = AsyncOpenAI(api_key="given with each door")

    async def __call__(self, door: Door, row: Mapping[str, Any]) -> None:
        self.port = urlsplit(door.url).port
        client = self._client.with_options(base_url=door.url, api_key=door.key)
        messages = [*row["prompt"]]
        for turn in range(TURNS):
            answer = await client.chat.completions.create(model=door.model, messages=messages, max_tokens=TURN_TOKENS)
            messages.append(answer.choices[0].message)
            messages.append({"role": "user", "content": f"turn {turn}"})


class Turns(TrainerCallback):
    """Times the steps, and holds the connections in every other one."""

    def __init__(self, agent: Agents, connections: int) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._agent = agent
        self._connections = connections
        self._holder: subprocess.Popen[str] | None = None
        self._holds = False
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step >= NUM_WARM:
            self._holds = bool(state.global_step % 2)
            number = self._connections if self._holds else 0
            command = [sys.executable, "-c", HOLD, str(number), str(self._agent.port)]
            self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != "held\n":
                raise RuntimeError(f"the connections do not stand: exit status {self._holder.wait(60)}")
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        seconds = time.perf_counter() - self._begun
        if state.global_step > NUM_WARM:  # which counts this step
            self.seconds[self._holds].append(seconds)
        self.close()

    def close(self) -> None:
        if self._holder is not None:
            self._holder.communicate(timeout=60)
            self._holder = None


def measure(options: argparse.Namespace, folder: Path) -> Report:
    on_cpu = options.device == "cpu"
    agent = Agents()
    turns = Turns(agent, options.connections)
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=on_cpu,
        bf16=False,
        per_device_train_batch_size=options.rows,
        num_generations=8,
        max_completion_length=TOKENS,
        vllm_max_model_length=TOKENS + 100,
        generation_kwargs={"ignore_eos": True},
        vllm_engine_kwargs={"enforce_eager": True} if on_cpu else None,
        learning_rate=0.0,  # so that all steps are alike
        max_steps=NUM_WARM + 2 * options.repetitions,
        save_strategy="no",
        report_to="none",
        check_rewards=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(save_model(folder / "model")),
        reward_funcs=lambda completions, **columns: [float(len(str(said)) % 2) for said in completions],
        args=args,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"row {row}"}] for row in range(options.rows)]}
        ),
        rollout_func=agents(agent),
        callbacks=[turns],
    )
    try:
        trainer.train()
    finally:
        turns.close()
        trainer.close()
    without, beside = (
        Figure(name=name, unit="s", values=tuple(turns.seconds[held]))
        for held, name in ((False, "a step"), (True, "beside idle connections"))
    )
    return Report(
        benchmark="agents",
        settings={"connections": options.connections, "agents": options.rows, "requests of an agent": TURNS}
        | {"tokens of a request": TURN_TOKENS},
        ratios=(ratio("a step / beside idle connections", without, beside, GOAL),),
        figures=(without, beside),
    )


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=32, help="agents of a batch")
    parser.add_argument("--connections", type=int, default=1000, help="that are open and silent")
    parser.set_defaults(repetitions=25)
    options = parser.parse_args()
    if options.short:
        options.rows, options.connections, options.repetitions = 8, 100, 1
    with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
        finish(measure(options, Path(folder)), options)


if __name__ == "__main__":
    main()
