"""Hidden states, whose tokens are tried one after the other. Needs torch.

SipIt (arXiv 2510.15511): a causal model's state at a position depends on the tokens up to there
alone, and unlike tokens give unlike states; so the token whose state is that which was sent is
found position by position.
"""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from inlay_audit.attacker import (
    Guesses,
    Known,
    Knows,
    NotApplicableError,
    SentRows,
    with_template,
)
from inlay_audit.attackers.pairs import Emission
from inlay_audit.prompts import Floats

_TRIED = (64, 256, 1024, 4096)
"""Tokens that are tried for a state, the likeliest by pairs: so many, then up to the next number.
The last takes seconds a state; no further token is tried."""
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
            raise NotApplicableError("the prompts have no token before a text, to begin from")
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
        self._model = model
        self._emission = Emission.of(known)
        self._template = known.template

    @torch.inference_mode()
    def guess(self, sent: SentRows) -> Guesses:
        """The tokens whose states are nearest."""
        before = torch.from_numpy(self._template.before)[None]
        for index, rows in enumerate(sent.rows):
            cache = DynamicCache(config=self._model.module.config.get_text_config())
            self._model.states_of(self._layer, input_ids=before, past_key_values=cache)
            first, stop = len(self._template.before), len(rows) - len(self._template.after)
            likeliest, _ = self._emission.likeliest(rows, _TRIED[0])
            ids = np.zeros(len(rows), np.int64)
            for place in range(first, max(stop, first)):
                sent.clock.check()
                wanted = torch.from_numpy(rows[place])
                token, error, after = 0, np.inf, cache
                tried = likeliest[place]
                for start, stop_at in pairwise((0, *_TRIED)):
                    if start >= len(tried):
                        # A small vocabulary is tried whole.
                        tried = self._emission.likeliest(rows[place : place + 1], _TRIED[-1])[0][0]
                    for first_of in range(start, min(stop_at, len(tried)), _AT_A_TIME):
                        some = tried[first_of : min(first_of + _AT_A_TIME, stop_at)]
                        other, distance, beside = self._nearest(
                            cache, torch.from_numpy(some), wanted
                        )
                        if distance < error:
                            token, error, after = other, distance, beside
                    if error <= self._near:
                        break
                ids[place], cache = token, after
            yield index, with_template(ids, self._template)

    def _nearest(self, cache: Any, tokens: Tensor, wanted: Tensor) -> tuple[int, float, Any]:
        """The best of some tokens after a prefix, its distance, and the prefix with it."""
        tried = copy.deepcopy(cache)
        tried.batch_repeat_interleave(len(tokens))
        states = self._model.states_of(
            self._layer, input_ids=tokens[:, None], past_key_values=tried
        )[:, -1]
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
