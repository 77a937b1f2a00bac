"""A transform that is trained against an inverter. Needs torch.

Two networks are trained in turn, as in adversarial obfuscation (TextObfuscator and others): the
inverter learns to name tokens, the transform to keep the model's answers while the inverter errs.
The inverter that reads it afterwards is another one, trained on the finished transform.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inlay_audit.neural.inverter import InverterNetwork, batch_of, loss_of
from inlay_audit.neural.language_model import LanguageModel, padded
from inlay_audit.prompts import AuditPrompt, Floats, Rng

_WIDTH = 256
_HEADS = 4
_STEPS = 300
_BATCH = 16
_RATE = 1e-3
_PROMPTS = 256
_ANSWER = 8


class _Network(nn.Module):
    """A shift of each of the user's rows, and the length of its noise, by the rows around it."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.enter = nn.Linear(width, _WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.shift = nn.Linear(_WIDTH, width)
        self.noise = nn.Linear(_WIDTH, 1)
        nn.init.zeros_(self.shift.weight)
        nn.init.constant_(self.noise.bias, -1.0)

    def forward(self, rows: Tensor, mask: Tensor, mine: Tensor, draw: Tensor) -> Tensor:
        """(b, n, h) rows with those at (b, n) `mine` changed; `draw` is standard normal."""
        inside = self.layer(self.enter(rows / self._scale), src_key_padding_mask=mask == 0)
        moved = self.shift(inside) + self.noise(inside).exp() * draw
        found: Tensor = rows + self._scale * moved * mine[..., None]
        return found


class Learned:
    """The transform, trained on public text when it is first used.

    Args:
        name: as it was asked for.
        model: whose answers are to be kept.
        table: (vocabulary, h).
        public: prompts to learn from.
        seed: of the training.
        weight: of what the inverter misses, in nats, beside the divergence of the answers.
    """

    can_resend = True

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        table: Floats,
        public: Sequence[AuditPrompt],
        *,
        seed: int,
        weight: float,
    ) -> None:
        self.name = name
        self._model = model
        self._table = table
        self._public = public[:_PROMPTS]
        self._seed = seed
        self._weight = weight

    def served(self, rows: Floats) -> Floats:
        return rows

    @torch.no_grad()
    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        """The rows of each prompt, moved, with new noise."""
        found = []
        for prompt, each in zip(prompts, rows, strict=True):
            inputs, mask = padded([each])
            draw = torch.from_numpy(rng.standard_normal(each.shape, dtype=np.float32))
            found.append(self._network(inputs, mask, _mine([prompt], mask), draw[None])[0].numpy())
        return found

    @cached_property
    def _network(self) -> _Network:
        rows = [self._table[prompt.ids] for prompt in self._public]
        answers = self._model.answers(rows, _ANSWER)
        scale = float(self._table.std())
        longest = max(len(prompt.ids) for prompt in self._public)
        rng = np.random.default_rng(self._seed)
        aim = _entropy(self._public)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self._seed)
            network = _Network(self._table.shape[1], scale)
            inverter = InverterNetwork(self._table.shape[1], self._table, longest)
            mine = torch.optim.AdamW(network.parameters(), lr=_RATE)
            theirs = torch.optim.AdamW(inverter.parameters(), lr=2 * _RATE)
            for _ in range(_STEPS):
                chosen = rng.integers(len(self._public), size=_BATCH).tolist()
                prompts = [self._public[index] for index in chosen]
                batch = batch_of(prompts, [rows[index] for index in chosen], 1.0)
                moved = network(
                    batch.rows,
                    batch.mask,
                    _mine(prompts, batch.mask),
                    torch.randn(batch.rows.shape),
                )
                theirs.zero_grad()
                read = loss_of(inverter, batch._replace(rows=moved.detach() / scale), rng)
                torch.autograd.backward(read)
                theirs.step()
                missed = loss_of(inverter, batch._replace(rows=moved / scale), rng)
                kept = self._divergence(prompts, moved, [answers[index] for index in chosen])
                mine.zero_grad()
                torch.autograd.backward(kept + self._weight * (aim - missed).clamp(min=0))
                mine.step()
        return network.requires_grad_(False)

    def _divergence(
        self, prompts: Sequence[AuditPrompt], moved: Tensor, answers: Sequence[Sequence[int]]
    ) -> Tensor:
        """Mean divergence of the answers' distributions, in nats a token."""
        embed = self._model.module.get_input_embeddings()
        given = [
            torch.cat([rows[: len(prompt.ids)], embed(torch.tensor(ids, dtype=torch.int64))])
            for prompt, rows, ids in zip(prompts, moved, answers, strict=True)
        ]
        clean = [
            embed(torch.from_numpy(np.concatenate([prompt.ids, np.asarray(ids, np.int64)])))
            for prompt, ids in zip(prompts, answers, strict=True)
        ]
        with torch.no_grad():
            wanted = self._logs(clean)
        said = self._logs(given)
        total = [
            (wanted[place, low:high].exp() * (wanted[place, low:high] - said[place, low:high])).sum(
                dim=-1
            )
            for place, (prompt, ids) in enumerate(zip(prompts, answers, strict=True))
            for low, high in [(len(prompt.ids) - 1, len(prompt.ids) + len(ids))]
        ]
        return torch.cat(total).mean()

    def _logs(self, prompts: Sequence[Tensor]) -> Tensor:
        rows = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        lengths = torch.tensor([len(each) for each in prompts])
        mask = (torch.arange(rows.shape[1]) < lengths[:, None]).long()
        found: Any = self._model.module(inputs_embeds=rows, attention_mask=mask).logits
        logs: Tensor = found.log_softmax(dim=-1)
        return logs


def _mine(prompts: Sequence[AuditPrompt], mask: Tensor) -> Tensor:
    """(b, n) ones at the users' rows."""
    mine = torch.zeros(mask.shape)
    for place, prompt in enumerate(prompts):
        mine[place, prompt.start : prompt.stop] = 1
    return mine


def _entropy(prompts: Sequence[AuditPrompt]) -> float:
    """That of the users' tokens, in nats."""
    _, counts = np.unique(np.concatenate([each.user for each in prompts]), return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())
