"""Hidden states, whose tokens are tried one after the other. Needs torch.

SipIt (arXiv 2510.15511): a causal model's state at a position depends on the tokens up to there
alone, and unlike tokens give unlike states; so the token whose state is that which was sent is
found position by position.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay_audit.attacker import Known, Knows, NotApplicableError, Sent, with_template
from inlay_audit.attackers.pairs import Emission
from inlay_audit.prompts import Floats, Ids

_CANDIDATES = 64
"""Tokens that are tried first, the likeliest by pairs."""
_AT_A_TIME = 512
_PROBED = 8
"""Public prompts that tell which layer's states were sent."""
_FAR = 0.5
"""Mean distance, over the states' own length, from which rows are no states of a layer."""


class HiddenSearch:
    """Finds the layer whose states were sent, then each token by computing its state."""

    name = "hidden-search"
    knows: Knows = "weights"

    def fit(self, known: Known) -> None:
        """Find the layer. Raises `NotApplicableError` where the rows are no layer's states."""
        if not known.keeps_rows:
            raise NotApplicableError("the number of rows is not that of the tokens")
        known.check_width()
        if not len(known.template.before):
            raise NotApplicableError("no token stands before a text, from which to begin")
        model = known.language_model()
        public, sent = known.public[:_PROBED], known.sent[:_PROBED]
        states = dict(model.hidden_states([known.table[each.ids] for each in public]))
        errors = [
            float(np.mean([_distance(states[i][layer], rows) for i, rows in enumerate(sent)]))
            for layer in range(model.layers)
        ]
        self._layer = int(np.argmin(errors))
        if errors[self._layer] > _FAR:
            raise NotApplicableError("the rows are no hidden states of a layer")
        largest = max(_distances(states[i][self._layer], rows).max() for i, rows in enumerate(sent))
        self._near = max(2 * float(largest), 1e-3)
        self._model = model.module
        self._vocabulary = len(known.table)
        self._emission = Emission.of(known)
        self._template = known.template

    @torch.inference_mode()
    def guess(self, sent: Sent) -> Sequence[Ids]:
        """The tokens whose states are nearest."""
        before = torch.from_numpy(self._template.before)[None]
        found = []
        for rows in sent.rows:
            cache = self._model(input_ids=before, logits_to_keep=1).past_key_values
            first, stop = len(self._template.before), len(rows) - len(self._template.after)
            likeliest = self._emission.likeliest(rows, _CANDIDATES)[0]
            ids = np.zeros(len(rows), np.int64)
            for place in range(first, max(stop, first)):
                wanted = torch.from_numpy(rows[place])
                tokens = torch.from_numpy(likeliest[place])
                token, error, after = self._nearest(cache, tokens, wanted)
                for start in range(0, self._vocabulary, _AT_A_TIME):
                    if error <= self._near:
                        break
                    tokens = torch.arange(start, min(start + _AT_A_TIME, self._vocabulary))
                    other, distance, beside = self._nearest(cache, tokens, wanted)
                    if distance < error:
                        token, error, after = other, distance, beside
                ids[place], cache = token, after
            found.append(with_template(ids, self._template))
        return found

    def _nearest(self, cache: Any, tokens: Tensor, wanted: Tensor) -> tuple[int, float, Any]:
        """The best of some tokens after a prefix, its distance, and the prefix with it."""
        tried = copy.deepcopy(cache)
        tried.batch_repeat_interleave(len(tokens))
        states = self._model(
            input_ids=tokens[:, None],
            past_key_values=tried,
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states[1 + self._layer][:, -1]
        errors = (states - wanted).norm(dim=1) / wanted.norm().clamp(min=1e-9)
        best = int(errors.argmin())
        tried.batch_select_indices(torch.tensor([best]))
        return int(tokens[best]), float(errors[best]), tried


def _distances(states: Floats, rows: Floats) -> Floats:
    """(n,) distances over the states' length."""
    found: Floats = np.linalg.norm(states - rows, axis=1) / np.maximum(
        np.linalg.norm(states, axis=1), 1e-9
    )
    return found


def _distance(states: Floats, rows: Floats) -> float:
    return float(_distances(states, rows).mean())
