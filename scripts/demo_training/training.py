"""Training of the model.

A Qwen3-shaped transformer, packed documents, Muon for matrices and AdamW for the rest.
"""

import logging
import random
import time
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise

import torch
from scripts.demo_training.corpus import Corpus, Document
from scripts.demo_training.tokenizer import END_OF_TEXT, MAX_POSITIONS, TURN_END
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

LOGGER = logging.getLogger(__name__)

SEQUENCE_LENGTH = 192
BATCH_SIZE = 12
WARMUP_STEPS = 60
MATRIX_LEARNING_RATE = 4e-3
OTHER_LEARNING_RATE = 4e-3
CONTEXT_SHARE = 0.1
"""Share of the tokens outside answers that are trained.

Most are drawn at random and cannot be predicted.
"""
CONTEXT_WEIGHT = 0.5
"""Loss weight of those."""
JUMP_SHARE = 0.25
"""Share of sequences whose positions jump ahead, so that distances beyond `SEQUENCE_LENGTH` are trained too."""
MAX_JUMPS = 6
SIGNAL = -1
"""Stands for a signal row among token ids."""
SIGNAL_SEED = 11
SIGNAL_SCALE = 0.1
SIGNAL_NOISE = 0.05
"""Standard deviation of what is added to each signal row in training."""


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """The shape of the model.

    About 2.3 million parameters, grouped-query attention, tied embeddings.
    """
    end_of_turn = tokenizer.token_to_id(TURN_END)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
        dtype="bfloat16",
    )


def encode_document(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """Token ids of a document, `SIGNAL` for a signal row, and for each whether the model has to give it."""
    ids: list[int] = []
    learned: list[bool] = []
    for signal, group in groupby(document, key=lambda piece: piece.signal):
        pieces = list(group)
        if signal:
            ids.extend([SIGNAL] * len(pieces))
            learned.extend([False] * len(pieces))
            continue
        encoding = tokenizer.encode("".join(piece.text for piece in pieces))
        ids.extend(encoding.ids)
        ends = list(accumulate(len(piece.text) for piece in pieces))
        learned.extend(pieces[bisect_right(ends, start)].learned for start, _ in encoding.offsets)
    return ids, learned


def signal_row(hidden: int) -> Tensor:
    """The row that asks for the material of a person's trade.

    One fixed random direction, in no embedding table.

    It stands for what no text can say, as the row of an image would. Nothing after training knows
    it.

    Returns:
        (hidden,) float32.
    """
    return SIGNAL_SCALE * torch.randn(hidden, generator=torch.Generator().manual_seed(SIGNAL_SEED))


def jumping_positions(rng: random.Random, length: int) -> list[int]:
    """Positions that rise by one except at a few places, where they jump ahead, ending below `MAX_POSITIONS`."""
    if rng.random() >= JUMP_SHARE:
        return list(range(length))
    cuts = sorted(rng.sample(range(1, length), rng.randint(1, MAX_JUMPS)))
    room = rng.randint(1, MAX_POSITIONS - length)
    marks = sorted(rng.randint(0, room) for _ in cuts)
    positions: list[int] = []
    for (begin, end), shift in zip(pairwise([0, *cuts, length]), [0, *marks], strict=True):
        positions.extend(position + shift for position in range(begin, end))
    return positions


def batches(
    corpus: Corpus, tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches of (ids, positions, weights), each (batch, sequence).

    A weight is of predicting that token.
    """
    rng = random.Random(seed)
    ids: list[int] = []
    weights: list[float] = []
    needed = SEQUENCE_LENGTH * BATCH_SIZE
    shape = (BATCH_SIZE, SEQUENCE_LENGTH)
    while True:
        while len(ids) < needed:
            document_ids, learned = encode_document(tokenizer, corpus.document())
            ids.extend(document_ids)
            weights.extend(
                1.0 if flag else CONTEXT_WEIGHT * (rng.random() < CONTEXT_SHARE and token != SIGNAL)
                for token, flag in zip(document_ids, learned, strict=True)
            )
        positions = [jumping_positions(rng, SEQUENCE_LENGTH) for _ in range(BATCH_SIZE)]
        yield (
            torch.tensor(ids[:needed]).view(shape),
            torch.tensor(positions),
            torch.tensor(weights[:needed]).view(shape),
        )
        del ids[:needed], weights[:needed]


def train_model(
    corpus: Corpus,
    tokenizer: Tokenizer,
    steps: int,
    seed: int,
    *,
    start: Qwen3ForCausalLM | None = None,
    rate: float = 1.0,
) -> Qwen3ForCausalLM:
    """Train for `steps` steps from `start`, or from random weights, at `rate` times the full learning rates.

    The weights returned are float32 that bfloat16 holds exactly.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config(tokenizer)).float() if start is None else start
    model.requires_grad_(True).train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(
            matrices,
            lr=rate * MATRIX_LEARNING_RATE,
            weight_decay=0.02,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=rate * OTHER_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
        ),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.02 - step / steps)
        )
        for optimizer in optimizers
    ]
    stream = batches(corpus, tokenizer, seed)
    began = time.monotonic()
    smooth = float("nan")
    for step in range(steps):
        ids, positions, weights = next(stream)
        loss, answer_loss = _loss(model, ids, positions, weights)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = answer_loss if step == 0 else 0.95 * smooth + 0.05 * answer_loss
        if step % 50 == 0 or step == steps - 1:
            LOGGER.info(
                "step %d answer loss %.3f after %.0f s", step, smooth, time.monotonic() - began
            )
    return round_to_bfloat16(model)


def round_to_bfloat16(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model in evaluation mode with every weight rounded to bfloat16 and kept as float32, as it is served."""
    model.to(torch.bfloat16).to(torch.float32)
    model.requires_grad_(False)
    model.eval()
    return model


def _embed(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Input rows (batch, sequence, hidden) with noisy signal rows where `ids` is `SIGNAL`."""
    rows = model.get_input_embeddings()(ids.clamp(min=0))
    signal = signal_row(rows.shape[-1]) + SIGNAL_NOISE * torch.randn_like(rows)
    return torch.where((ids == SIGNAL)[..., None], signal, rows)


def _loss(
    model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor, weights: Tensor
) -> tuple[Tensor, float]:
    """Weighted cross-entropy, and the plain mean of it over answers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # A mask of ones: without one, transformers takes jumping positions for borders between
        # sequences.
        hidden = model.model(
            inputs_embeds=_embed(model, ids),
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).last_hidden_state
        chosen = weights[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][chosen])
    losses = nn.functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    shares = weights[:, 1:][chosen]
    answers = losses.detach()[shares == 1.0].mean().item()
    return (losses * shares).sum() / shares.sum(), answers
