"""Rows weighed against what the model itself would say next. Needs torch.

BeamClean (arXiv 2505.13758) does so with noise that it estimates; here the noise is that of a
`pairs.Emission`, which pairs teach, or the template's rows alone.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inlay_audit.attacker import (
    Clock,
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    with_template,
)
from inlay_audit.attackers.pairs import Emission
from inlay_audit.prompts import Floats, Ids

_BEAMS = 8
_CANDIDATES = 32
_TOGETHER = 16
"""Prompts that are read at a time."""


class Beam:
    """The likeliest text by the rows and by the language model together, by beam search.

    Args:
        name: short, in the words of the report.
        knows: its needs beside the rows.
        emission: estimates the noise of what is known.
    """

    def __init__(self, name: str, knows: Knows, emission: Callable[[Known], Emission]) -> None:
        self.name = name
        self.knows: Knows = knows
        self._estimate = emission

    @classmethod
    def with_pairs(cls) -> "Beam":
        """The attacker whose noise and key are those that pairs teach."""
        return cls("beam", "weights", Emission.of)

    @classmethod
    def of_context(cls) -> "Beam":
        """The attacker without a pair: the nearest tokens, of which context chooses."""
        return cls("context", "model", Emission.of_template)

    def fit(self, known: Known) -> None:
        """Estimate the noise. Raises `NotApplicableError` without the model or its template."""
        if not known.keeps_rows:
            raise NotApplicableError("the number of rows is not that of the tokens")
        if not len(known.template.before):
            raise NotApplicableError("the prompts have no token before a text, to begin from")
        self._emission = self._estimate(known)
        self._model = known.language_model().module
        self._template = known.template

    def guess(self, sent: SentRows) -> Guesses:
        """The best beam of each prompt."""
        order = sorted(range(len(sent.rows)), key=lambda index: len(sent.rows[index]))
        starts = range(0, len(order), _TOGETHER)
        # Not the short ones first: what was read when the time is over stands for all.
        for place in np.random.default_rng(0).permutation(len(starts)):
            chunk = order[starts[place] : starts[place] + _TOGETHER]
            read = self._read([sent.rows[index] for index in chunk], sent.clock)
            for index, ids in zip(chunk, read, strict=True):
                yield index, with_template(ids, self._template)

    @torch.inference_mode()
    def _read(self, prompts: Sequence[Floats], clock: Clock) -> Iterator[Ids]:
        """Read prompts that are sorted by length; all texts begin at the same position."""
        before, after = self._template.before, self._template.after
        count, first = len(prompts), len(before)
        ends = torch.tensor([max(len(rows) - len(after), first + 1) for rows in prompts])
        candidates = self._candidates(prompts)
        ids = torch.from_numpy(before).expand(count * _BEAMS, -1)
        step = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        texts = torch.zeros(count, _BEAMS, 0, dtype=torch.int64)
        totals = torch.full((count, _BEAMS), -torch.inf)
        totals[:, 0] = 0
        row = torch.arange(count)[:, None]
        for place in range(first, int(ends.max())):
            clock.check()
            logits = step.logits[:, -1]
            tokens, likely = (
                torch.from_numpy(
                    np.stack([each[part][min(place, len(each[part]) - 1)] for each in candidates])
                )
                for part in (0, 1)
            )
            spread = tokens[:, None, :].expand(-1, _BEAMS, -1)
            # Only the candidates' probabilities: of all tokens they are 134 MB in a large model.
            said = logits.view(count, _BEAMS, -1).gather(2, spread)
            said = said - logits.logsumexp(dim=-1).view(count, _BEAMS, 1)
            scored = totals[:, :, None] + likely[:, None, :] + said
            best, chosen = scored.flatten(1).topk(_BEAMS)
            beams, picks = chosen // _CANDIDATES, chosen % _CANDIDATES
            picked = tokens.gather(1, picks)
            # Prompts that have ended stay as they are.
            still = (place < ends)[:, None]
            totals = torch.where(still, best, totals)
            beams = torch.where(still, beams, torch.arange(_BEAMS))
            texts = torch.cat([texts[row, beams], picked[:, :, None]], dim=2)
            step.past_key_values.batch_select_indices((row * _BEAMS + beams).flatten())
            step = self._model(
                input_ids=picked.reshape(-1, 1),
                past_key_values=step.past_key_values,
                use_cache=True,
            )
        return self._whole(texts[:, 0], ends, prompts)

    def _candidates(self, prompts: Sequence[Floats]) -> list[tuple[Ids, Floats]]:
        """Of each prompt (n, c) tokens and log likelihoods below the largest, in nats."""
        ids, likely = self._emission.likeliest(np.concatenate(prompts), _CANDIDATES)
        ends = np.cumsum([len(rows) for rows in prompts])[:-1]
        likely = likely - likely[:, :1]
        return list(zip(np.split(ids, ends), np.split(likely, ends), strict=True))

    def _whole(self, texts: Tensor, ends: Tensor, prompts: Sequence[Floats]) -> Iterator[Ids]:
        before, after = self._template.before, self._template.after
        for text, end, rows in zip(texts.numpy(), ends.tolist(), prompts, strict=True):
            yield np.concatenate([before, text[: end - len(before)], after])[: len(rows)]
