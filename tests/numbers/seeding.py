"""Where faults are put into a loaded model: its values, attributes, modules, attention, batches."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from inlay.engine.torch import model as model_module
from inlay.engine.torch.attention.choice import attention as usual_attention
from inlay.engine.torch.attention.paged import Projection, Scoring
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights.linear import RMSNorm
from inlay.engine.torch.weights.linear_methods import LinearMethod

AttentionChange = Callable[
    [Tensor, Tensor, Tensor, Scoring], tuple[Tensor, Tensor, Tensor, Scoring]
]
"""Of queries [Q, T, D], keys [H, T, D], values [H, T, E] and the scoring."""


class Seeding(ExitStack):
    """Changes of a model, undone at the end."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.model = model
        self.whole: Any = model._model
        self.layers: list[Any] = list(model.decoder_layers)
        attending = [at for at, shape in enumerate(model.layers) if not shape.state_size]
        self.middle = attending[len(attending) // 2]
        self.changed = 0

    def put(self, thing: Any, name: str, value: object) -> None:
        """Give an attribute another value."""
        self.enter_context(mock.patch.object(thing, name, value))
        self.changed += 1

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Give a tensor other values."""
        kept = tensor.detach().clone()
        self.callback(lambda: tensor.data.copy_(kept))
        tensor.data.copy_(values)
        self.changed += 1

    def after(self, module: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Change what a module gives: `change(input, output)`."""

        def hook(_: Any, given: Any, named: Any, found: Any) -> Any:
            first = given[0] if given else named["hidden_states"]
            if isinstance(found, tuple):
                return change(first, found[0]), *found[1:]
            return change(first, found)

        self.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        self.changed += 1

    def before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Change what a module takes."""
        handle = module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
        self.callback(handle.remove)
        self.changed += 1

    def attending(self, change: AttentionChange, layers: set[int] | None = None) -> None:
        """Change queries, keys, values and scoring of some layers, or of all."""

        def attention(*given: Any, **named: Any) -> Any:
            return _Changed(usual_attention(*given, **named), change, layers)

        self.put(model_module, "attention", attention)

    def batches(self, change: Callable[[Batch], Batch]) -> None:
        """Change the batches of steps that decode."""
        usual = self.model.hidden

        def hidden(batch: Batch, *given: Any, **named: Any) -> Tensor:
            return usual(change(batch) if batch.decoding else batch, *given, **named)

        self.put(self.model, "hidden", hidden)

    def named(self, *names: str) -> list[Any]:
        """Modules of the layers that have one of some attributes."""
        return [each for each in self.whole.modules() if any(hasattr(each, name) for name in names)]

    def products(self) -> list[LinearMethod]:
        """Products of the layers, in order."""
        return [each for each in self.whole.base_model.modules() if isinstance(each, LinearMethod)]

    def norms(self, layer: int | None = None) -> list[Any]:
        """Norms of whole positions, of a layer or of all layers."""
        layers = self.layers if layer is None else [self.layers[layer]]
        return [
            norm
            for each in layers
            for path, norm in each.named_modules()
            if _is_norm(norm) and "." not in path
        ]


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, RMSNorm) or type(module).__name__.endswith("Norm")


class _Changed:
    """A `PagedAttention` that is given something else."""

    def __init__(self, paged: Any, change: AttentionChange, layers: set[int] | None) -> None:
        self._paged, self._change, self._layers = paged, change, layers

    def attend(self, layer: int, *given: Any) -> Any:
        if self._layers is None or layer in self._layers:
            query, key, value, scoring = given
            given = self._change(query, key, value, scoring)
        return self._paged.attend(layer, *given)

    def attend_projected(self, layer: int, projection: Projection, scoring: Scoring) -> Any:
        if self._layers is None or layer in self._layers:
            count, queries = len(projection.heads), projection.query_heads
            size = self._size(projection)
            heads = projection.heads.view(count, -1, size).transpose(0, 1)
            keys = (len(heads) - queries) // 2
            stop = queries + keys
            *parts, scoring = self._change(
                heads[:queries], heads[queries:stop], heads[stop:], scoring
            )
            joined = torch.cat(parts).transpose(0, 1).reshape(count, -1)
            projection = projection._replace(heads=joined)
        return self._paged.attend_projected(layer, projection, scoring)

    def _size(self, projection: Projection) -> int:
        if projection.norms is not None:
            return len(projection.norms[0])
        return projection.rotated
