"""A small network that is trained on the transform itself. Needs torch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inlay_audit.attacker import (
    Clock,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    with_template,
)
from inlay_audit.neural.language_model import padded
from inlay_audit.prompts import AuditPrompt, Floats

_WIDTH = 256
_HEADS = 4
_STEPS = 400
_BATCH = 16
_RATE = 2e-3
_SENDS = 4
"""Times that public text is sent to learn from, where the transform has new randomness."""
_HELD_OUT = 0.1
_IGNORED = -100
_SAMPLED = 4096
"""Tokens that a step tells apart from those of the public text, in a larger vocabulary."""


class LearningBatch(NamedTuple):
    """Prompts to learn from: (b, n, h) rows, (b, n) mask, (b, n) user's token ids or `_IGNORED`."""

    rows: Tensor
    mask: Tensor
    ids: Tensor


class InverterNetwork(nn.Module):
    """One layer of a transformer over the rows of a prompt, beside a map of each row alone.

    Args:
        width: elements of a row that was sent.
        table: (vocabulary, h); the nearest of its rows are the answers, so that tokens which were
            never seen can be named too.
        longest: rows of a prompt at most.
    """

    points: Tensor
    bias: Tensor

    def __init__(self, width: int, table: Floats, longest: int) -> None:
        super().__init__()
        points = torch.from_numpy(table / table.std())
        self.register_buffer("points", points)
        self.register_buffer("bias", -0.5 * points.square().sum(dim=1))
        self.enter = nn.Linear(width, _WIDTH)
        self.places = nn.Embedding(longest, _WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.leave = nn.Linear(_WIDTH, table.shape[1])
        self.alone = nn.Linear(width, table.shape[1])
        self.sharpness = nn.Parameter(torch.tensor(0.1))

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Rows (b, n, h), near those of the table, for (b, n, width) rows that were sent."""
        places = torch.arange(rows.shape[1]).clamp(max=self.places.num_embeddings - 1)
        inside = self.enter(rows) + self.places(places)
        mixed = self.layer(inside, src_key_padding_mask=mask == 0)
        found: Tensor = self.leave(mixed) + self.alone(rows)
        return found

    def logits(self, found: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits (n, vocabulary) of (n, h) rows that `forward` gave, or those of some tokens."""
        points, bias = self.points, self.bias
        if tokens is not None:
            points, bias = points[tokens], bias[tokens]
        logits: Tensor = self.sharpness * (found @ points.T + bias)
        return logits


def loss_of(network: InverterNetwork, batch: LearningBatch, rng: np.random.Generator) -> Tensor:
    """Mean cross entropy of the user's tokens, in nats.

    Of a large vocabulary `_SAMPLED` other tokens stand for all others, each for as many as they
    are (sampled softmax, as in Jean and others, arXiv 1412.2007).
    """
    mine = batch.ids != _IGNORED
    found, wanted = network(batch.rows, batch.mask)[mine], batch.ids[mine]
    vocabulary = len(network.points)
    own, places = torch.unique(wanted, return_inverse=True)
    if vocabulary <= 4 * _SAMPLED:
        return nn.functional.cross_entropy(network.logits(found), wanted)
    drawn = np.setdiff1d(rng.integers(vocabulary, size=_SAMPLED), own.numpy())
    logits = network.logits(found, torch.cat([own, torch.from_numpy(drawn)]))
    more = float(np.log((vocabulary - len(own)) / len(drawn)))
    weights = torch.cat([torch.zeros(len(own)), torch.full((len(drawn),), more)])
    return nn.functional.cross_entropy(logits + weights, places)


def batch_of(prompts: Sequence[AuditPrompt], rows: Sequence[Floats], scale: float) -> LearningBatch:
    """The batch of some prompts and the rows that were sent for them, divided by `scale`."""
    inputs, mask = padded(rows)
    ids = torch.full(mask.shape, _IGNORED)
    for place, prompt in enumerate(prompts):
        ids[place, prompt.start : prompt.stop] = torch.from_numpy(prompt.user)
    return LearningBatch(inputs / scale, mask, ids)


class Inverter:
    """Names tokens with a network that was trained on public text sent through the transform.

    Trained anew for every transform, as an attacker would. Of the training's steps the one is kept
    that reads held-out public text best.
    """

    name = "inverter"
    knows: Knows = "pairs"

    def fit(self, known: Known) -> None:
        """Train. Raises `NotApplicableError` where rows and tokens are not in step."""
        if not known.keeps_rows:
            raise NotApplicableError("the number of rows is not that of the tokens")
        sends = [known.sent]
        if known.send is not None:
            again = known.send()
            if any(not np.array_equal(a, b) for a, b in zip(known.sent, again, strict=True)):
                sends += [again, *(known.send() for _ in range(_SENDS - 2))]
        held = max(1, int(len(known.public) * _HELD_OUT))
        self._scale = max(float(np.concatenate(known.sent).std()), 1e-9)
        self._template = known.template
        longest = max(len(rows) for rows in known.sent)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._network = InverterNetwork(known.sent[0].shape[1], known.table, longest)
            self._train(known.public, sends, held, known.clock)

    def _train(
        self,
        public: Sequence[AuditPrompt],
        sends: Sequence[Sequence[Floats]],
        held: int,
        clock: Clock,
    ) -> None:
        network = self._network
        rng = np.random.default_rng(0)
        check = batch_of(public[:held], sends[0][:held], self._scale)
        optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
        best, kept = float("inf"), network.state_dict()
        for step in range(1, _STEPS + 1):
            clock.check()
            chosen = held + rng.integers(len(public) - held, size=_BATCH)
            rows = sends[int(rng.integers(len(sends)))]
            batch = batch_of(
                [public[index] for index in chosen], [rows[index] for index in chosen], self._scale
            )
            optimiser.zero_grad()
            torch.autograd.backward(loss_of(network, batch, rng))
            optimiser.step()
            rates.step()
            if step % 50 == 0:
                with torch.no_grad():
                    # The same others each time, so that losses compare.
                    loss = float(loss_of(network, check, np.random.default_rng(1)))
                if loss < best:
                    best = loss
                    kept = {name: each.clone() for name, each in network.state_dict().items()}
        network.load_state_dict(kept)

    @torch.no_grad()
    def guess(self, sent: SentRows) -> Guesses:
        """The likeliest token of each row."""
        for index, rows in enumerate(sent.rows):
            if index:
                sent.clock.check()
            inputs, mask = padded([rows])
            near = self._network(inputs / self._scale, mask)[0]
            ids = self._network.logits(near).argmax(dim=-1).numpy()
            yield index, with_template(ids, self._template)
