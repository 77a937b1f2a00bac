"""The language model that answers with a caption, and its training."""

import logging
import random
import time

import torch
from scripts.demo_training.tokenizer import (
    END_OF_TEXT,
    TURN_END,
    TURN_START,
    train_tokenizer,
)
from scripts.painter_demo.captions import WORDS, answer, question
from scripts.vision_demo.pictures import COLOURS
from scripts.vision_demo.training import Steps, optimizers
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

LOGGER = logging.getLogger(__name__)

BATCH = 64
RATE = 3e-3
EXAMPLES = 2000
"""Questions that the tokenizer is trained on."""

NAMES = tuple(COLOURS)


def draw(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    digit, colour = rng.randrange(len(WORDS)), rng.choice(NAMES)
    return question(digit, colour, rng), answer(digit, colour)


def chat(text: str) -> str:
    """The prompt of a question, as the chat template renders it."""
    return f"{TURN_START}user\n{text}{TURN_END}\n{TURN_START}assistant\n"


def build_tokenizer(seed: int) -> Tokenizer:
    """A byte-level tokenizer in which every word of the questions is a token."""
    rng = random.Random(seed)
    pairs = [draw(rng) for _ in range(EXAMPLES)]
    return train_tokenizer([chat(asked) + told for asked, told in pairs])


def build_writer(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights in float32."""
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[end, pad],
        pad_token_id=pad,
    )
    return Qwen3ForCausalLM(config).float()


def train_writer(model: Qwen3ForCausalLM, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Train on questions and answers; weights end as numbers that bfloat16 holds."""
    rng = random.Random(seed)
    (end,), (pad,) = (tokenizer.encode(text).ids for text in (TURN_END, END_OF_TEXT))
    going = Steps(optimizers([(model, RATE)]), steps)
    began = time.process_time()
    for step in range(steps):
        rows = []
        for asked, words in (draw(rng) for _ in range(BATCH)):
            prompt = tokenizer.encode(chat(asked)).ids
            rows.append((prompt, [*tokenizer.encode(words).ids, end]))
        length = max(len(prompt) + len(told) for prompt, told in rows)
        ids = torch.full((BATCH, length), pad)
        labels = torch.full((BATCH, length), -100)
        for index, (prompt, told) in enumerate(rows):
            ids[index, : len(prompt) + len(told)] = torch.tensor(prompt + told)
            labels[index, len(prompt) : len(prompt) + len(told)] = torch.tensor(told)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        going.take(loss, model.parameters())
        if step % 50 == 0 or step == steps - 1:
            spent = time.process_time() - began
            LOGGER.info("writer %4d loss %.4f, %.0f CPU s", step, loss.item(), spent)
    model.to(torch.bfloat16).to(torch.float32)
    model.requires_grad_(False).eval()


@torch.no_grad()
def ask(model: Qwen3ForCausalLM, tokenizer: Tokenizer, text: str) -> str:
    """The greedy answer to a question."""
    ids = torch.tensor([tokenizer.encode(chat(text)).ids])
    told = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    return tokenizer.decode(told)
