"""Prompts with images in a real engine: what it makes of them, and what it computes behind them."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.model.picture_probe import PictureProbe, picture_probe
from grpo.model.pictures import encoded
from grpo.model.text_part import placeholder_ids
from grpo.rollout.packing import REFUSED
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Pictured, Prompts, collapse
from grpo.weights.limits import GapVerdict
from grpo.weights.probe import probe_prompts
from grpo.weights.verifier import Verifier
from tests.support.bare_engine import START_S, engine_spec
from tests.support.multimodal_models import engines_environment, save_multimodal_model

CALL_S = 120.0
LIMIT = 1e-3  # in float32


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A tiny LLaVA, its processor and an engine of it."""
    folder = tmp_path_factory.mktemp("pictures")
    path = save_multimodal_model("llava", folder / "llava")
    environment = engine_environment(
        {**os.environ, **engines_environment()}, devices=(), tensor_parallel_size=1, engines_per_node=1
    )
    spec = engine_spec(path, enable_chunked_prefill=False, limit_mm_per_prompt={"image": 2, "video": 0})
    spec.sampling["max_tokens"] = 4
    client = EngineClient(spec, name="the engine", environment=environment, log_path=folder / "engine.log")
    try:
        ready = client.wait_ready(START_S)
        yield SimpleNamespace(
            client=client,
            pool=EnginePool([client], max_num_seqs=[ready.max_num_seqs], max_tokens=4),
            processor=AutoProcessor.from_pretrained(path),
            model=AutoModelForImageTextToText.from_pretrained(path),
        )
    finally:
        client.close()


def test_prompt_logprobs_behind_image_match_model(there: SimpleNamespace) -> None:
    probe = picture_probe(there.processor, "3+4 is more than 5+6")
    with torch.no_grad():
        logprobs = there.model(**probe.inputs).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, probe.inputs["input_ids"][:, 1:, None])[:, -probe.num_scored :, 0].numpy()
    assert np.abs(expected[0] - expected[1]).max() > 10 * LIMIT  # the picture counts

    def apart(*pictures: bytes) -> float:
        scored = there.client.call(
            "prompt_logprobs", CALL_S, prompts=[probe.token_ids] * len(pictures), pictures=[*pictures]
        )
        assert [len(row) for row in scored] == [probe.inputs["input_ids"].shape[1] - 1] * len(pictures)
        found = np.asarray(scored)[:, -probe.num_scored :]
        return float(np.abs(found - expected).max())

    assert apart(*probe.pictures) < LIMIT
    assert apart(*probe.pictures[::-1]) > 10 * LIMIT
    assert apart(*[encoded(Image.new("RGB", (64, 64)))] * 2) > LIMIT


def verifier(there: SimpleNamespace, pictures: PictureProbe) -> Verifier:
    return Verifier(
        model=there.model,
        clients=[there.client],
        probe=probe_prompts(there.model.config.text_config.vocab_size, 64, placeholder_ids(there.model.config)),
        dtype=torch.float32,
        asked_limit=None,
        autocast=contextlib.nullcontext,
        cast_lm_head_to_fp32=False,
        timeout_s=CALL_S,
        largest=lambda mine: mine,
        pictures=pictures,
    )


def test_verification_with_other_image_in_engine_refuses(there: SimpleNamespace) -> None:
    probe = picture_probe(there.processor, "3+4 is more than 5+6")
    verified = verifier(there, probe)
    gap, _ = verified.verify(1, engines_work=True) or pytest.fail("no engine was asked")
    assert verified.judge(gap, was_sent_again=False) is GapVerdict.PASS

    blank = encoded(Image.new("RGB", (64, 64)))
    blind = verifier(there, replace(probe, pictures=(blank, blank)))
    gap, _ = blind.verify(1, engines_work=True) or pytest.fail("no engine was asked")
    verdict = blind.judge(gap, was_sent_again=False)
    assert verdict is GapVerdict.REFUSE
    assert "log-probabilities of the same tokens behind an image differ by" in blind.statement(verdict, gap, 1)


def test_verification_with_changed_vision_tower_refuses(there: SimpleNamespace) -> None:
    """Text alone would not show it."""
    probe = picture_probe(there.processor, "3+4 is more than 5+6")
    weight = there.model.model.vision_tower.get_parameter("embeddings.patch_embedding.weight")
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.neg_()
        changed = verifier(there, probe)
        gap, _ = changed.verify(1, engines_work=True) or pytest.fail("no engine was asked")
    finally:
        weight.data.copy_(before)
    assert gap.behind_image
    assert changed.judge(gap, was_sent_again=False) is GapVerdict.REFUSE


def test_pool_with_other_image_expansion_refuses_row_with_both_lengths(there: SimpleNamespace) -> None:
    probe = picture_probe(there.processor, "3+4 is more than 5+6")
    ids = probe.inputs["input_ids"][0].numpy().astype(np.int32)
    image = there.model.config.image_token_id
    twice = np.concatenate([[image] * 16, ids]).astype(np.int32)  # as if its placeholders had been expanded again
    prompts = Prompts(
        rows=Prompts.of([probe.token_ids] * 4).rows,
        pictured={
            row: Pictured(pictures=probe.pictures[:1], expanded=twice if row == 2 else ids) for row in (0, 1, 2, 3)
        },
    )
    requests = [*collapse(prompts, 0, 0)]
    assert len(requests) == 1  # the copies of one prompt
    of_rows = [collapse(Prompts(rows=Prompts.of([probe.token_ids]).rows, pictured={0: prompts.pictured[row]}), row, 0)
               for row in range(4)]  # fmt: skip
    batch = there.pool.submit([request for (request,) in of_rows])
    completions = there.pool.collect(batch, CALL_S)
    assert completions is not None
    assert (completions.policy_versions == REFUSED).tolist() == [False, False, True, False]
    (why,) = batch.refusals
    assert f"the engine makes {len(ids)} tokens of a prompt with images" in why
    assert f"the trainer's processor {len(twice)} [GRPO-418]" in why
