"""LoRA adapters of a pipeline's models: each forward pass has one, or none."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inlay.adapter.files import LoraPair
from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.adapters import lora_files, lows_of
from inlay.engine.torch.lora import LowRankPair

_TEXT_MODEL = "text_model."
"""In names of CLIP's layers of files older than transformers 5, which has none."""


class PipelineLoras:
    """The adapters that are loaded. On the engine's thread.

    Args:
        models: whose linear layers are adapted, by their names in the pipeline: the denoiser and
            text encoders, as far as they are loaded here.
        elsewhere: names of those that are other stages here, for which an adapter's file may have
            matrices too.
        rank: largest of an adapter; None: adapters are off.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], elsewhere: Collection[str], rank: int | None
    ) -> None:
        self.rank = rank or 0
        self._refused = None
        if rank is None:
            self._refused = "LoRA adapters are off; start the worker with --enable-lora"
        elif not models:
            self._refused = (
                f"LoRA adapters are of the denoiser and of text encoders ({', '.join(elsewhere)}), "
                "which are stages of their own here; this is a VAE, for which none are published"
            )
        self._models = models
        self._elsewhere = elsewhere
        self._loaded: dict[str, Mapping[str, LowRankPair]] = {}
        self._active: Mapping[str, LowRankPair] = {}
        self._layers: dict[str, nn.Linear] = {}
        self._hooks: list[RemovableHandle] = []
        for component, model in models.items() if rank is not None else ():
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear):
                    layer = f"{component}.{name}"
                    self._layers[layer] = module
                    self._hooks.append(module.register_forward_hook(partial(self._add, layer)))

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of the layers by name, behind that of their model."""
        return {name: (one.out_features, one.in_features) for name, one in self._layers.items()}

    def __contains__(self, name: str) -> bool:
        """Return True if an adapter is there."""
        return name in self._loaded

    def put(self, name: str, directory: str) -> None:
        """Load an adapter. Raises `InvalidRequestError` if it does not fit, or none is taken."""
        if self._refused is not None:
            raise InvalidRequestError(self._refused)
        files = lora_files(directory)
        files = replace(files, modules=self._own(files.modules))
        # Rounded to each layer's own dtype: models keep some in another than the rest.
        lows = lows_of(files, self, torch.float32)
        self._loaded[name] = {
            layer: LowRankPair(
                low.down.to(self._layers[layer].weight), low.up.to(self._layers[layer].weight)
            )
            for layer, low in lows.items()
        }

    def _own(self, modules: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
        """Return the matrices for models here, by the names of `shapes`.

        In diffusers' form names begin with that of a model; in PEFT's all are of one model.
        """
        named = {name.partition(".")[0] for name in modules}
        if "vae" in named:
            raise InvalidRequestError(
                "the adapter has matrices of the VAE; adapters are of the denoiser and of text "
                "encoders"
            )
        if not named & {*self._models, *self._elsewhere}:
            known = self._layers.keys()

            def fitting(model: str) -> int:
                return sum(self._here(f"{model}.{name}") in known for name in modules)

            model = max(self._models, key=fitting)
            return {self._here(f"{model}.{name}"): pair for name, pair in modules.items()}
        if not named & self._models.keys():
            raise InvalidRequestError(
                f"the adapter is of {', '.join(sorted(named))}; this stage has "
                f"{', '.join(self._models)}"
            )
        return {
            self._here(name): pair
            for name, pair in modules.items()
            if name.partition(".")[0] not in self._elsewhere
        }

    def _here(self, name: str) -> str:
        """Return a layer's name as the model here has it; as diffusers reads it."""
        model, _, layer = name.partition(".")
        has = hasattr(self._models.get(model), "text_model")
        if model.startswith("text_encoder") and layer.startswith(_TEXT_MODEL) and not has:
            return f"{model}.{layer.removeprefix(_TEXT_MODEL)}"
        return name

    def remove(self, name: str) -> None:
        """Free an adapter, if it is there."""
        self._loaded.pop(name, None)

    def close(self) -> None:
        """Let go of the models, which would keep the adapters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def used(self, name: str | None) -> Iterator[None]:
        """Have the models compute with an adapter, or none, until the block ends."""
        self._active = {} if name is None else self._loaded[name]
        try:
            yield
        finally:
            self._active = {}

    def _add(
        self, name: str, _: nn.Module, given: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        low = self._active.get(name)
        return None if low is None else output + (given[0] @ low.down.T) @ low.up
