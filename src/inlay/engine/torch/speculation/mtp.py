"""The multi-token prediction layer of DeepSeek-V3's checkpoints, behind the model's last layer.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2: `eh_proj` makes one vector of the normed embedding
of the next position and the normed last state of the model; a layer like the model's follows, with
its norm and head (`shared_head`). Further tokens are guessed from its own states behind that norm,
as vLLM and SGLang do.
"""

import copy
from collections.abc import Callable
from collections.abc import Sequence as Run
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from inlay.engine.torch.attention.layers import observe
from inlay.engine.torch.attention.paged import IMPLEMENTATION, PagedAttention
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.speculation.draft_head import check_served, refusal
from inlay.engine.torch.weights.checkpoint import load
from inlay.engine.torch.weights.families import family_of, next_token_layers
from inlay.engine.torch.weights.latent import keep_latent
from inlay.engine.torch.weights.linear import accelerate
from inlay.tensors.table import config_of, stored_tensors

METHOD = "mtp"

_OUTSIDE = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "model.norm.",
    "shared_head.head.": "lm_head.",
}
"""Names of weights beside the layer, in the files and in `_NextTokenModel`."""


class _NextTokenModel(DeepseekV3ForCausalLM):  # type: ignore[misc]  # transformers has no types
    """A model of one layer, with what joins it to the served model, for transformers to load."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.enorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.post_init()


class NextTokenHead:
    """A `DraftHead`; use `load_mtp`."""

    table = None

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        """Take a loaded `_NextTokenModel`, and the number of the served model's last states."""
        self.layers = layers
        self.shape = observe(model.base_model)[0]
        # Embeddings are the served model's.
        model.base_model.embed_tokens = None
        self._model = model

    def combine(self, states: Run[Tensor]) -> Tensor:
        """As in `DraftHead`."""
        return states[0]

    def advance(
        self, embeds: Tensor, states: Tensor, positions: Tensor, paged: PagedAttention
    ) -> Tensor:
        """As in `DraftHead`."""
        both = torch.cat((self._model.enorm(embeds), self._model.hnorm(states)), -1)
        found: Tensor = self._model.base_model(
            inputs_embeds=self._model.eh_proj(both)[None],
            position_ids=positions[None],
            use_cache=False,
            paged=paged,
        ).last_hidden_state[0]
        return found

    def likeliest(self, states: Tensor) -> Tensor:
        """As in `DraftHead`."""
        ids: Tensor = self._model.lm_head(states).argmax(-1)
        return ids


def load_mtp(model: CausalModel) -> NextTokenHead:
    """Load the first multi-token prediction layer in the files of `model`.

    Raises:
        InvalidRequestError: there is none, or it cannot be read.
    """
    check_served(model, METHOD)
    directory = Path(model.path)
    config = config_of(directory)
    if config.get("model_type") != "deepseek_v3":
        raise refusal(
            METHOD,
            f"models of type {config.get('model_type')!r} are not read; allowed: deepseek_v3",
        )
    places = next_token_layers(config)
    if not any(tensor.name.startswith(places or "\0") for tensor in stored_tensors(directory)):
        raise refusal(METHOD, "the model's files have no layer of multi-token prediction")
    parsed = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    layer = copy.deepcopy(parsed)
    layer.num_hidden_layers, layer.first_k_dense_replace = 1, 0
    on_cpu = model.device.type == "cpu"
    found = load(
        _NextTokenModel,
        directory,
        dtype=model.dtype,
        attn_implementation=IMPLEMENTATION,
        spared="model.embed_tokens.",
        config=layer,
        keep_quantised=on_cpu,
        device=None if on_cpu else model.device,
        rename=_named(places[0]),
    )
    keep_latent(found, None)
    accelerate(found, family_of(config).fused)
    return NextTokenHead(found, (parsed.num_hidden_layers,))


def _named(place: str) -> Callable[[str], str | None]:
    """Return what names weights of the layer at `place` as in `_NextTokenModel`, others None."""

    def rename(name: str) -> str | None:
        own = name.removeprefix(place)
        if own == name or own.startswith("embed_tokens."):
            return None
        for outside, inside in _OUTSIDE.items():
            if own.startswith(outside):
                return inside + own.removeprefix(outside)
        return f"model.layers.0.{own}"

    return rename


__all__ = ["METHOD", "NextTokenHead", "load_mtp"]
