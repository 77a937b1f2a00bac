"""The whole model, for answers and for attackers that have its weights. Needs torch."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import is_gguf
from inlay.tensors.hub import asking_hub, local_directory
from inlay.tensors.tidy_directory import tidied
from inlay_audit.prompts import AuditPrompt, Floats, Rng

_ROWS_AT_A_TIME = 2048
"""Rows that one forward pass computes at most, padding included."""

_COMPARED = 8
"""Prompts whose distributions are held at once."""


class _Enough(Exception):
    """The layer that was sought has been computed."""


class LanguageModel:
    """A causal language model of transformers, in float32.

    Attributes:
        module: the model; its weights are frozen.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        ends = module.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])

    @classmethod
    def load(cls, model: str | Path) -> "LanguageModel":
        """Load the model of a directory or a name on the hub.

        Raises:
            InvalidRequestError: transformers does not load it.
        """
        # What goes on is said in one place.
        logging.disable_progress_bar()
        local = local_directory(model)
        if local is not None and is_gguf(local):
            raise InvalidRequestError(
                f"{local} is GGUF, which attacks with the whole model do not read; make "
                f"safetensors of it: inlay convert {shlex.quote(str(local))}"
            )
        given = nullcontext(str(model)) if local is None else tidied(local)
        try:
            with asking_hub(str(model)), given as path:
                module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (ValueError, KeyError, ImportError) as error:
            raise InvalidRequestError(
                f"transformers cannot load {model} as a causal language model: {error}"
            ) from error
        return cls(module.eval().requires_grad_(False))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.module.config.get_text_config().num_hidden_layers)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Floats], most: int) -> list[list[int]]:
        """Greedy answers to rows (m, h), of `most` tokens, up to their end, which is left out."""
        found: list[list[int]] = [[] for _ in prompts]
        for chunk in _chunks([len(rows) + most for rows in prompts]):
            rows, mask = padded([prompts[index] for index in chunk], left=True)
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            step = self.module(
                inputs_embeds=rows, attention_mask=mask, position_ids=places, logits_to_keep=1
            )
            unended = set(chunk)
            for _ in range(most):
                best = step.logits[:, -1].argmax(dim=-1)
                for index, token in zip(chunk, best.tolist(), strict=True):
                    if token in self._ends:
                        unended.discard(index)
                    elif index in unended:
                        found[index].append(token)
                if not unended:
                    break
                mask = torch.cat([mask, mask.new_ones(len(chunk), 1)], dim=1)
                places = places[:, -1:] + 1
                step = self.module(
                    input_ids=best[:, None],
                    attention_mask=mask,
                    position_ids=places,
                    past_key_values=step.past_key_values,
                )
        return found

    @torch.inference_mode()
    def log_probabilities(
        self, prompts: Sequence[Floats], answers: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Log probabilities at each token of an answer and behind its last.

        Args:
            prompts: rows, (m, h) each.
            answers: of each prompt, t token ids.

        Yields:
            The prompt's index and (t + 1, vocabulary), in some order.
        """
        lengths = [len(rows) + len(ids) for rows, ids in zip(prompts, answers, strict=True)]
        embed = self.module.get_input_embeddings()
        for chunk in _chunks(lengths):
            whole = [
                np.concatenate(
                    [prompts[index], embed(torch.tensor(answers[index], dtype=torch.int64)).numpy()]
                )
                for index in chunk
            ]
            # The head is computed at the answers alone, which end together.
            rows, mask = padded(whole, left=True)
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            longest = max(len(answers[index]) for index in chunk) + 1
            logits = self.module(
                inputs_embeds=rows,
                attention_mask=mask,
                position_ids=places,
                logits_to_keep=longest,
            ).logits
            for place, index in enumerate(chunk):
                said = logits[place, longest - len(answers[index]) - 1 :]
                yield index, said.log_softmax(dim=-1)

    @torch.inference_mode()
    def states_of(self, layer: int, **inputs: Any) -> Tensor:
        """States (b, n, h) that a layer gives, counted from 0.

        Neither later layers nor the head are computed, where the model has its layers in a list.

        Args:
            layer: that is sought.
            inputs: of the model.
        """
        layers = getattr(self.module.base_model, "layers", ())
        if layer >= len(layers) - 1:
            # Behind the last layer stands the norm.
            whole = self.module(**inputs, output_hidden_states=True, logits_to_keep=1)
            last: Tensor = whole.hidden_states[1 + layer]
            return last
        found: list[Tensor] = []

        def stop(module: object, given: object, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)
            raise _Enough

        hook = layers[layer].register_forward_hook(stop)
        try:
            self.module.base_model(**inputs)
        except _Enough:
            pass
        finally:
            hook.remove()
        return found[0]

    def states(self, layer: int, prompts: Sequence[Floats]) -> Iterator[tuple[int, Floats]]:
        """The states (m, h) that `states_of` gives of rows (m, h) of each prompt.

        Yields:
            The prompt's index and its states, in some order.
        """
        for chunk in _chunks([len(rows) for rows in prompts]):
            rows, mask = padded([prompts[index] for index in chunk])
            states = self.states_of(layer, inputs_embeds=rows, attention_mask=mask)
            for place, index in enumerate(chunk):
                yield index, states[place, : len(prompts[index])].numpy().copy()

    @torch.inference_mode()
    def hidden_states(self, prompts: Sequence[Floats]) -> Iterator[tuple[int, list[Floats]]]:
        """The states that each layer gives of rows (m, h) of each prompt.

        Yields:
            The prompt's index and (m, h) for each layer, in some order.
        """
        for chunk in _chunks([len(rows) for rows in prompts]):
            rows, mask = padded([prompts[index] for index in chunk])
            states = self.module(
                inputs_embeds=rows,
                attention_mask=mask,
                output_hidden_states=True,
                logits_to_keep=1,
            ).hidden_states[1:]
            for place, index in enumerate(chunk):
                count = len(prompts[index])
                yield index, [layer[place, :count].numpy().copy() for layer in states]


def padded(prompts: Sequence[Floats], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """(batch, longest, h) rows and (batch, longest) ones where there are any."""
    longest = max(len(rows) for rows in prompts)
    rows = torch.zeros(len(prompts), longest, prompts[0].shape[1])
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for place, each in enumerate(prompts):
        where = slice(longest - len(each), None) if left else slice(len(each))
        rows[place, where] = torch.from_numpy(np.ascontiguousarray(each))
        mask[place, where] = 1
    return rows, mask


def _chunks(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of prompts that are computed together, alike in length."""
    chunk: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if chunk and (len(chunk) + 1) * lengths[index] > _ROWS_AT_A_TIME:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


@dataclass(frozen=True, eq=False)
class LayerTransform:
    """A transform: what a layer of the model makes of the rows.

    Attributes:
        name: as it was asked for.
        layer: counted from 1.
        model: that has it.
    """

    name: str
    layer: int
    model: LanguageModel
    can_resend: bool = False

    @classmethod
    def of(cls, name: str, layer: float, model: LanguageModel) -> "LayerTransform":
        """Of a layer. Raises `InvalidRequestError` where the model has no such layer."""
        if layer != int(layer) or layer > model.layers:
            raise InvalidRequestError(
                f"--transform {name}: the model has layers 1 to {model.layers}"
            )
        return cls(name, int(layer), model)

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        found = dict(self.model.states(self.layer - 1, rows))
        return [found[index] for index in range(len(rows))]

    def served(self, rows: Floats) -> None:
        """None: they enter the model behind this layer."""


class ModelAnswers:
    """Greedy answers of a model in this process."""

    def __init__(
        self, model: LanguageModel, decode: Callable[[Sequence[int]], str], most: int
    ) -> None:
        self._model = model
        self._decode = decode
        self._most = most
        self._clean: list[list[int]] | None = None

    def __call__(self, rows: Sequence[Floats]) -> list[str]:
        """The answer to each prompt's rows, (m, h), in order."""
        return [self._decode(ids) for ids in self._model.answers(rows, self._most)]

    def divergence(self, rows: Sequence[Floats], own: Sequence[Floats]) -> float:
        """Mean Kullback-Leibler divergence of the answers to `rows` from those to `own`.

        Args:
            rows: (m, h) of each prompt.
            own: (n, h) of the same prompts; their greedy answers say at which tokens distributions
                are compared. They are the same at every call.

        Returns:
            Nats a token.
        """
        if self._clean is None:
            self._clean = self._model.answers(own, self._most)
        found = []
        # A few prompts at a time: distributions over a large vocabulary are megabytes each.
        for start in range(0, len(rows), _COMPARED):
            some = slice(start, start + _COMPARED)
            wanted = dict(self._model.log_probabilities(own[some], self._clean[some]))
            for index, said in self._model.log_probabilities(rows[some], self._clean[some]):
                truth = wanted[index]
                found.append((truth.exp() * (truth - said)).sum(dim=-1).numpy())
        return float(np.concatenate(found).mean())
