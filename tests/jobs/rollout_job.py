"""A training job whose ranks take different numbers of turns; `tiny_job.py` with a rollout function.

`settings["turns"]`: of each rank. A row that takes none is answered by the function itself. Writes every turn to
`<output_dir>/ranks/turns-<rank>.jsonl`. Where `hold` is "turn-1", rank 0 waits before the third turn of step 1 until
the test writes `<output_dir>/go-on`.
"""

import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import grpo

settings = json.loads(Path(sys.argv[1]).read_text())
out = Path(settings["config"]["output_dir"])
CHUNK = 3  # tokens of a turn
PREAMBLE = [9] * 30  # of every prompt: a block of the cache is 32 tokens at least, on CPUs


async def one_row(row: int, prompt: list[int], trainer: Any, turns: int) -> tuple[list[int], list[float], list[int]]:
    rank, step = trainer.accelerator.process_index, trainer.state.global_step
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for number in range(turns):
        if settings["hold"] == f"turn-{step}" and (rank, number) == (0, 2):
            (out / f"at-turn-{step}").touch()
            while not (out / "go-on").exists():
                await asyncio.sleep(0.05)
        turn = await trainer.vllm_generation.sample([*prompt, *ids], row=row, turn=number, max_tokens=CHUNK)
        note = {"step": step, "row": row, "turn": number, "said": turn.token_ids}
        with (out / "ranks" / f"turns-{rank}.jsonl").open("a") as lines:
            lines.write(json.dumps(note) + "\n")
        ids += [*turn.token_ids, 5]
        logprobs += [*turn.logprobs, 0.0]
        mask += [1] * len(turn.token_ids) + [0]
    return (ids, logprobs, mask) if ids else ([6, 1], [0.0, 0.0], [1, 1])


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    prompt_ids = [PREAMBLE + ids for ids in trainer.processing_class(prompts)["input_ids"]]
    turns = settings["turns"][trainer.accelerator.process_index]

    async def all_rows() -> list[Any]:
        return await asyncio.gather(*(one_row(row, ids, trainer, turns) for row, ids in enumerate(prompt_ids)))

    ids, logprobs, mask = zip(*asyncio.run(all_rows()), strict=True)
    return {"prompt_ids": prompt_ids, "completion_ids": [*ids], "logprobs": [*logprobs], "env_mask": [*mask]}


class WithRollouts(grpo.GRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rollout_func=rollout, **kwargs)


grpo.GRPOTrainer = WithRollouts  # type: ignore[misc]
runpy.run_path(str(Path(__file__).with_name("tiny_job.py")), run_name="__main__")
