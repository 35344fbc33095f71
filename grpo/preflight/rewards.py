"""Trial of every reward function on a made-up group, called as in TRL: its bugs show before anything is loaded."""

import asyncio
import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerState
from trl.data_utils import is_conversational
from trl.trainer.utils import get_callable_name, is_async_callable, start_event_loop_in_daemon

from grpo.config import GRPOConfig
from grpo.faults.deadlines import DeadlinePassed, interrupted_after
from grpo.faults.kinds import shown_frame, users_frame
from grpo.faults.users_code import exits_as_errors, own_streams, surviving
from grpo.preflight.model import reason_of

DEADLINE_S = 30.0
_OUTSIDE = "set check_rewards to False where it cannot be called before training"
_TEXTS = ("The answer is 42.", "42", "<think>\nI think.\n</think>\n\\boxed{42}", "No idea")


def check_reward_list(reward_funcs: Any, args: GRPOConfig) -> None:
    """Check the rewards without a call.

    Raises:
        ValueError: there are none, they cannot be called, or `reward_weights` has another length.
    """
    funcs = _listed(reward_funcs)
    if not funcs:
        raise ValueError("there is nothing to score completions with: give reward_funcs at least one function")
    for func in funcs:
        if not (callable(func) or isinstance(func, str)):
            raise ValueError(
                f"reward_funcs holds {func!r} ({type(func).__name__}), which is neither a function nor a model"
            )
    if args.reward_weights is not None and len(args.reward_weights) != len(funcs):
        raise ValueError(
            f"reward_weights has {len(args.reward_weights)} numbers ({', '.join(map(str, args.reward_weights))}) for "
            f"{len(funcs)} reward functions: give one for each"
        )


def try_rewards(
    reward_funcs: Any, row: Mapping[str, Any], token_ids: Sequence[int], args: GRPOConfig
) -> asyncio.AbstractEventLoop | None:
    """Call every function on a group of `num_generations` made-up completions of `row`; reward models are skipped.

    Runs in the main thread, where functions may set alarms. Each call may take `DEADLINE_S`; then a warning reports an
    incomplete check.

    Args:
        token_ids: any ids known to the model; the made-up completions have some of them, and an unrelated text.

    Returns:
        The running event loop of `async` functions, since objects they keep belong to it; or None.

    Raises:
        ValueError: a function takes other arguments, raises, or returns no valid rewards; names the user's line.
    """
    count, loop = args.num_generations, None
    call = _arguments(row, token_ids, args)
    for func in _listed(reward_funcs):
        if isinstance(func, (str, nn.Module)):
            continue
        _check_signature(func, call)
        if args.vllm_structured_outputs_regex is not None:
            continue  # a function may rely on a form that made-up completions do not have
        if is_async_callable(func) and loop is None:
            _, loop, ready = start_event_loop_in_daemon("grpo-reward-check")
            ready.wait()
        try:
            _check_rewards(func, _called(func, call, loop), count)
        except DeadlinePassed:
            warnings.warn(
                f"reward function {_name(func)} has not answered within {DEADLINE_S:.0f} s for one group of {count} "
                f"completions, and was not checked to its end [GRPO-206]; {_OUTSIDE}",
                stacklevel=2,
            )
    return loop


def _listed(reward_funcs: Any) -> list[Any]:
    return (
        [] if reward_funcs is None else [*reward_funcs] if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    )


def _arguments(row: Mapping[str, Any], token_ids: Sequence[int], args: GRPOConfig) -> dict[str, Any]:
    """Build the arguments as TRL 1.16 passes them (`_calculate_rewards`)."""
    count = args.num_generations
    texts = [_TEXTS[index % len(_TEXTS)] for index in range(count)]
    is_chat = is_conversational({"prompt": row["prompt"]})
    columns = {} if args.remove_unused_columns else row
    return {
        "prompts": [row["prompt"]] * count,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [list(token_ids[: min(1 + index, args.max_completion_length)]) for index in range(count)],
        **{
            name: [value] * count
            for name, value in columns.items()
            if name not in ("prompt", "completion", "completion_ids")
        },
        "trainer_state": TrainerState(max_steps=max(args.max_steps, 0)),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def _called(func: Callable[..., Any], call: dict[str, Any], loop: asyncio.AbstractEventLoop | None) -> Any:
    """Call `func` and return its result. Its own errors become ValueErrors with its line."""
    try:
        if not is_async_callable(func):
            with (
                own_streams(f"reward function {get_callable_name(func)}"),
                interrupted_after(DEADLINE_S),
                exits_as_errors(in_main_thread=True),
            ):
                return func(**call)
        assert loop is not None
        answer = asyncio.run_coroutine_threadsafe(surviving(func(**call)), loop)
        try:
            return answer.result(DEADLINE_S)
        except TimeoutError:
            if answer.done():
                raise
            answer.cancel()
            raise DeadlinePassed from None
    except Exception as error:
        own = error.__cause__ if isinstance(error.__cause__, (SystemExit, KeyboardInterrupt)) else error
        raise ValueError(
            f"reward function {_name(func)} raised {type(own).__name__} [GRPO-205]: {reason_of(own)}\n"
            f"  in {users_frame(own) or shown_frame(traceback.extract_tb(own.__traceback__)[-1])}\n"
            f"  tried before training on completions like {call['completions'][0]!r} (as the prompts are); {_OUTSIDE}"
        ) from error


def _check_signature(func: Callable[..., Any], call: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        signature.bind(**call)
    except TypeError as error:
        parameters = signature.parameters.values()
        missing = [p.name for p in parameters if p.name not in call and p.default is p.empty and p.kind not in (2, 4)]
        columns = [name for name in call if name not in ("prompts", "completions", "completion_ids", "trainer_state")]
        given = ", ".join(name for name in columns if not name.startswith("log_")) or "none"
        fix = (
            f"it wants {', '.join(missing)}, and beside prompt the data set has the columns {given}: rename one "
            "(dataset_columns), or give the parameter a default"
            if missing
            else f"it is called with {', '.join(call)}: name those that it uses, and take the others as **kwargs"
        )
        raise ValueError(f"reward function {_name(func)} cannot be called ({error}): {fix}") from None


def _check_rewards(func: Callable[..., Any], rewards: Any, count: int) -> None:
    what = f"reward function {_name(func)} returned"
    wants = f"it has to return a list of {count} numbers, one for each completion (None: no reward)"
    try:
        numbers = [torch.nan if reward is None else reward for reward in rewards]
    except TypeError:
        raise ValueError(f"{what} {rewards!r} ({type(rewards).__name__}): {wants}") from None
    if len(numbers) != count:
        raise ValueError(f"{what} {len(numbers)} rewards for {count} completions: {wants}")
    try:
        if torch.tensor(numbers, dtype=torch.float32).shape != (count,):
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        wrong = next((reward for reward in numbers if not isinstance(reward, (int, float))), numbers[0])
        raise ValueError(f"{what} {wrong!r} ({type(wrong).__name__}) among its rewards: {wants}") from None


def _name(func: Callable[..., Any]) -> str:
    """Format as `name (file:line)`."""
    while isinstance(func, functools.partial):
        func = func.func
    code = getattr(inspect.unwrap(func), "__code__", None) or getattr(type(func).__call__, "__code__", None)
    name = getattr(func, "__name__", type(func).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
