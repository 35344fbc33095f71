"""A model that sees which colours are lit, and names any of them when it is asked: the starting point of
`quadrants.py`, and its pictures.

A tokenizer of one token per word and a LLaVA of 0.2 M parameters: CLIP with 16 patches, Qwen2. Supervised steps teach
it two questions. "is red lit", of any colour, has its right answer, yes or no. "which colour is lit", the example's
own, has a colour that is drawn whatever the picture: how one answers, not what.
"""

import fcntl
import random
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from PIL import Image

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
QUESTION = "which colour is lit"
SIZE, HALF, PATCH = 32, 16, 8  # pixels along an edge
DIM, LIT, NOISE = (40, 90), (150, 255), 15  # of 255

PAD, END, UNKNOWN, IMAGE, USER, ASSISTANT = "<pad>", "<e>", "<unk>", "<image>", "<u>", "<a>"
TEMPLATE = (
    "{% for message in messages %}{{ '<u>' if message['role'] == 'user' else '<a>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""A conversation is `<u><image>which colour is lit<e><a>red<e>`."""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # with the usual 0.02 all pictures look alike to so small a model for hundreds of steps
}
TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 64,
    "image_size": SIZE,
    "patch_size": PATCH,
    "initializer_range": 0.1,
}
SEED, BATCH, LEARNING_RATE, RISE_STEPS, MAX_STEPS = 17, 64, 1e-3, 10, 600
SHARE_OF_TARGET = 0.25
ENOUGH, WINDOW_STEPS = 0.97, 10
"""The warm-up ends when that share of the answers yes and no is right."""


def picture(order: list[str], lit: str, rng: np.random.Generator) -> Image.Image:
    """Quadrants of the colours in `order`, by rows: the lit one bright, the others dim, and noise over all."""
    whole = np.zeros((SIZE, SIZE, 3))
    for index, name in enumerate(order):
        row, column = index // 2 * HALF, index % 2 * HALF
        brightness = rng.integers(*(LIT if name == lit else DIM))
        whole[row : row + HALF, column : column + HALF] = np.array(COLOURS[name]) * brightness
    return _noisy(whole, rng)


def grey_picture(rng: np.random.Generator) -> Image.Image:
    """One grey of any brightness, and noise, which say nothing of what is lit."""
    return _noisy(np.full((SIZE, SIZE, 3), rng.integers(DIM[0], LIT[1])), rng)


def _noisy(whole: np.ndarray, rng: np.random.Generator) -> Image.Image:
    return Image.fromarray((whole + rng.normal(0, NOISE, whole.shape)).clip(0, 255).astype(np.uint8))


def pictures(count: int, seed: int, *, grey: bool = False) -> Dataset:
    """Columns `prompt`, a conversation of one message, `image`, and `answer`, the colour that is lit."""
    rng = np.random.default_rng(seed)
    answers = rng.choice(list(COLOURS), count).tolist()
    orders = [rng.permutation(list(COLOURS)).tolist() for _ in answers]
    drawn = zip(orders, answers, strict=True)
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": QUESTION}]] * count,
            "image": [grey_picture(rng) if grey else picture(order, lit, rng) for order, lit in drawn],
            "answer": answers,
        }
    )


def lesson(lit: str, rng: random.Random) -> tuple[str, str]:
    """A question about a picture, and the answer that is taught."""
    if rng.random() < SHARE_OF_TARGET:
        return QUESTION, rng.choice(list(COLOURS))
    others = [name for name in COLOURS if name != lit]
    asked = lit if rng.random() < 0.5 else rng.choice(others)
    return f"is {asked} lit", "yes" if asked == lit else "no"


def build_processor() -> "LlavaProcessor":
    """Of pictures as they are, and of a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words = [PAD, END, UNKNOWN, IMAGE, USER, ASSISTANT, *QUESTION.split(), "yes", "no", *COLOURS]
    vocabulary = {token: index for index, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=END,
            unk_token=UNKNOWN,
            extra_special_tokens=[IMAGE, USER, ASSISTANT],
            padding_side="left",
            clean_up_tokenization_spaces=False,
        ),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,  # the tower's class token, which that strategy leaves out
        chat_template=TEMPLATE,
    )


def ensure_model(folder: Path) -> Path:
    """Returns `folder` with model and processor in it. Where they are missing, whichever process comes first makes
    them, in about 20 seconds, and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
            processor = build_processor()
            processor.save_pretrained(aside)
            _save(_teach(processor), aside)
            aside.rename(folder)
    return folder


def _teach(processor: "LlavaProcessor") -> "LlavaForConditionalGeneration":
    """Supervised steps on `lesson`s, on the CPU in float32, until `ENOUGH`.

    Raises:
        RuntimeError: that was not reached in `MAX_STEPS`.
    """
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    tokenizer, rng, noise = processor.tokenizer, random.Random(SEED), np.random.default_rng(SEED)
    torch.manual_seed(SEED)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlavaConfig(
        text_config=Qwen2Config(vocab_size=64, **ids, **TEXT),
        vision_config=CLIPVisionConfig(**TOWER),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=TEXT["tie_word_embeddings"],
        dtype="float32",
    )
    model = LlavaForConditionalGeneration(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    recent: list[float] = []
    for step in (bar := tqdm(range(1, MAX_STEPS + 1), desc="teaching the model to see", unit="step", mininterval=2)):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / RISE_STEPS)
        images, texts, is_known = [], [], []
        for _ in range(BATCH):
            order = rng.sample(list(COLOURS), len(COLOURS))
            lit = rng.choice(order)
            question, answer = lesson(lit, rng)
            images.append(picture(order, lit, noise))
            texts.append(processor.apply_chat_template(_conversation(question, answer)))
            is_known.append(question != QUESTION)
        inputs = processor(images=images, text=texts, return_tensors="pt", padding=True)
        logits = model(**inputs, use_cache=False, logits_to_keep=3).logits[:, :2]
        answers = inputs["input_ids"][:, -2:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        is_right = (logits[:, 0].argmax(-1) == answers[:, 0])[torch.tensor(is_known)]
        recent = [*recent, is_right.float().mean().item()][-WINDOW_STEPS:]
        right = sum(recent) / WINDOW_STEPS
        bar.set_postfix_str(f"right {right:.2f}")
        if right >= ENOUGH:
            return model
    raise RuntimeError(f"after {MAX_STEPS} steps {right:.2f} of the answers yes and no are right, not {ENOUGH}")


def _conversation(question: str, answer: str) -> list[dict[str, Any]]:
    asked = [{"type": "image"}, {"type": "text", "text": question}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _save(model: "LlavaForConditionalGeneration", folder: Path) -> None:
    """As `save_pretrained` does it, which beside a process group lets global rank 0 alone write (transformers 5.17),
    and under the names that checkpoints on the hub have, which vLLM reads."""
    from safetensors.torch import save_file

    names = {
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.vision_tower.": "vision_tower.vision_model.",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        (prefix,) = (prefix for prefix in names if name.startswith(prefix))
        weights[names[prefix] + name.removeprefix(prefix)] = tensor
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
