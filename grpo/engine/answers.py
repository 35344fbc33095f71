"""Conversion of one vLLM request: its arguments, and its output as our messages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grpo.engine.messages import Begun, Sampled
from grpo.model.pictures import decoded, digest


def sampling_params(settings: dict[str, Any], *, seed: int, n: int = 1, prompt_logprobs: int | None = None) -> Any:
    """Make `SamplingParams` for one request; detokenizes only if stop strings need text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    settings = dict(settings)
    if isinstance(settings.get("structured_outputs"), dict):
        settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
    if settings.get("logit_bias"):  # tokens have become strings in JSON
        settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
    settings.setdefault("detokenize", bool(settings.get("stop")))
    return SamplingParams(
        **settings,
        seed=seed,
        n=n,
        logprobs=0,
        flat_logprobs=prompt_logprobs is None,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_prompt(token_ids: list[int], pictures: Sequence[bytes] = (), *, cache_salt: str | None = None) -> Any:
    """Make a prompt as vLLM takes it.

    Args:
        pictures: image files of the prompt; `token_ids` has one placeholder for each.
    """
    from vllm.inputs import TokensPrompt, tokens_input

    if not pictures:  # a rendered input: vLLM hands any other to a thread, one by one (0.31)
        return tokens_input(token_ids, cache_salt=cache_salt)
    prompt = TokensPrompt(
        prompt_token_ids=token_ids,
        multi_modal_data={"image": [decoded(file) for file in pictures]},
        multi_modal_uuids={"image": [digest(file) for file in pictures]},
    )
    return prompt if cache_salt is None else {**prompt, "cache_salt": cache_salt}


def check_expansion(held: Sequence[int], wanted: Sequence[int]) -> None:
    """Check that the engine expanded images to the tokens the trainer will score.

    Raises:
        ValueError: it expanded them differently from the trainer's processor.
    """
    if list(held) != list(wanted):
        raise ValueError(other_expansion(len(held), len(wanted)))


def other_expansion(held: int, wanted: int) -> str:
    """Error text if engine and processor expand a prompt with images to different numbers of tokens."""
    return (
        f"the engine makes {held} tokens of a prompt with images, the trainer's processor {wanted} [GRPO-418]: both "
        "have to read the same processor files and chat template"
    )


def refusal(completion_id: int, error: BaseException) -> Sampled:
    import numpy as np
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineGenerateError

    reported = error
    if isinstance(error, EngineGenerateError) and error.__cause__ is not None:  # it has no text of its own
        reported = error.__cause__
    return Sampled(
        completion_id=completion_id,
        token_ids=np.empty(0, np.int32),
        engine_logprobs=np.empty(0, np.float32),
        error=f"{type(reported).__name__}: {reported}",
        is_refusal=isinstance(error, (ValueError, VLLMClientError)),  # vLLM's class for requests it rejects
    )


def begun_of(token_ids: Sequence[int], logprobs: Any, *, is_whole: bool, behind: Begun | None = None) -> Begun:
    """Collect a completion's tokens.

    Args:
        logprobs: vLLM's flat ones: with `logprobs=0` a position has the sampled token alone.
        behind: its tokens before these.
    """
    import numpy as np

    if len(logprobs.logprobs) != len(token_ids):
        raise RuntimeError(f"vLLM gave {len(logprobs.logprobs)} log-probabilities for {len(token_ids)} tokens")
    tokens, values = np.asarray(token_ids, np.int32), np.asarray(logprobs.logprobs, np.float32)
    if behind is not None:
        tokens = np.concatenate([behind.token_ids, tokens])
        values = np.concatenate([behind.engine_logprobs, values])
    return Begun(token_ids=tokens, engine_logprobs=values, is_whole=is_whole)


def under_way(request_states: Iterable[Any]) -> Iterator[tuple[int, Sequence[int], Any, bool]]:
    """Yield each completion started and not answered by vLLM: id, tokens, flat log-probabilities, True if ended.

    Args:
        request_states: of vLLM's output processor. A request of several completions has one for each that still runs;
            ended ones wait in their parent for the last one.
    """
    for state in request_states:
        if not state.external_req_id.isdecimal():
            continue  # a probe
        first = int(state.external_req_id)
        yield first + state.request_index, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs, False
        for ended in state.parent_req.output_aggregator if state.parent_req is not None else ():
            if ended is not None and ended.finish_reason != "abort":
                yield first + ended.index, ended.token_ids, ended.logprobs, True
