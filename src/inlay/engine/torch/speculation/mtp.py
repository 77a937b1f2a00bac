"""Multi-token prediction: a layer in a model's files, behind the model's last layer.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2: a product makes one vector of the normed embedding
of the next position and the normed last state of the model; a layer like the model's follows, with
its norm and head. Further tokens are guessed from its own states behind that norm, as vLLM and
SGLang do. DeepSeek-V3 has a head for it, Qwen3-Next and Qwen3.5 take the model's, and have full
attention in that layer.
"""

import copy
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from inlay.engine.torch.attention.layers import observe
from inlay.engine.torch.attention.paged import IMPLEMENTATION, PagedAttention
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.speculation.draft_head import check_served, refusal
from inlay.engine.torch.weights.checkpoint import load, parsed_config
from inlay.engine.torch.weights.families import family_of, next_token_layers
from inlay.engine.torch.weights.latent import keep_latent
from inlay.engine.torch.weights.linear import accelerate
from inlay.tensors.checkpoint import config_of, stored_tensors

METHOD = "mtp"


class _Form(NamedTuple):
    """A family's way to write the layer.

    Attributes:
        changes: fields of the configuration of a model of that layer alone.
        names: prefixes of weight names in the files behind `place`, and in `_with_join`; the first
            that fits holds, None leaves the weight out.
        place: prefix of the names of all its weights; None where it is numbered after the layers.
        own_head: the files have a head for it.
    """

    changes: Mapping[str, Any]
    names: Mapping[str, str | None]
    place: str | None = None
    own_head: bool = False


_QWEN = _Form(
    {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    {
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "fc.": "eh_proj.",
        "norm.": "model.norm.",
        "layers.0.": "model.layers.0.",
        "": None,
    },
    place="mtp.",
)

_FORMS = {
    "deepseek_v3": _Form(
        {"num_hidden_layers": 1, "first_k_dense_replace": 0},
        {
            "embed_tokens.": None,
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "eh_proj.",
            "shared_head.norm.": "model.norm.",
            "shared_head.head.": "lm_head.",
            "": "model.layers.0.",
        },
        own_head=True,
    ),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}
"""By `model_type`."""


def _with_join(kind: Any) -> Any:
    """Return a class of models of one layer, with what joins it to the served model.

    For transformers to load; `kind` is its class of the served model.
    """

    class NextTokenModel(kind):  # type: ignore[misc]  # transformers has no types
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size, norm = config.hidden_size, type(self.model.norm)
            self.enorm = norm(size, config.rms_norm_eps)
            self.hnorm = norm(size, config.rms_norm_eps)
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
            self.post_init()

    return NextTokenModel


class NextTokenHead:
    """A `DraftHead`; use `load_mtp`."""

    table = None

    def __init__(
        self, model: Any, layers: tuple[int, ...], served: CausalModel | None = None
    ) -> None:
        """Take a loaded model of the layer.

        Args:
            model: of a class of `_with_join`.
            layers: number of the served model's last states.
            served: the model whose output head it takes; None where it has its own.
        """
        self.layers = layers
        self._served = served
        self.shape = observe(model.base_model)[0]
        # Embeddings are the served model's.
        model.base_model.embed_tokens = None
        if served is not None:
            model.lm_head = None
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
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            use_cache=False,
            paged=paged,
        ).last_hidden_state[0]
        return found

    def likeliest(self, states: Tensor) -> Tensor:
        """As in `DraftHead`."""
        served = self._served
        logits: Tensor = self._model.lm_head(states) if served is None else served.logits(states)
        return logits.argmax(-1)


def load_mtp(model: CausalModel) -> NextTokenHead:
    """Load the first multi-token prediction layer in the files of `model`.

    Raises:
        InvalidRequestError: there is none, or it cannot be read.
    """
    check_served(model, METHOD, follows_axes=True)
    directory = Path(model.path)
    config = config_of(directory)
    # Of a model with images the language model has the layer.
    parsed = parsed_config(directory).get_text_config()
    form = _FORMS.get(parsed.model_type)
    if form is None:
        raise refusal(
            METHOD,
            f"models of type {config.get('model_type')!r} are not read; allowed: "
            f"{', '.join(_FORMS)}",
        )
    places = next_token_layers(config) if form.place is None else (form.place,)
    if not any(tensor.name.startswith(places or "\0") for tensor in stored_tensors(directory)):
        raise refusal(METHOD, "the model's files have no layer of multi-token prediction")
    layer = copy.deepcopy(parsed)
    for name, value in form.changes.items():
        setattr(layer, name, value)
    family = family_of({"model_type": parsed.model_type})
    on_cpu = model.device.type == "cpu"
    found = load(
        _with_join(getattr(transformers, family.architecture)),
        directory,
        dtype=model.dtype,
        attn_implementation=IMPLEMENTATION,
        spared=("model.embed_tokens.",) if form.own_head else ("model.embed_tokens.", "lm_head."),
        config=layer,
        keep_quantised=on_cpu,
        device=None if on_cpu else model.device,
        rename=_named(places[0], form.names),
    )
    keep_latent(found, None)
    accelerate(found, family.fused)
    head = None if form.own_head else model
    return NextTokenHead(found, (parsed.num_hidden_layers,), head)


def _named(place: str, names: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """Return what names weights of the layer at `place` as in `_with_join`, others None."""

    def rename(name: str) -> str | None:
        own = name.removeprefix(place)
        if own == name:
            return None
        outside = next((outside for outside in names if own.startswith(outside)), None)
        inside = None if outside is None else names[outside]
        return None if inside is None else inside + own.removeprefix(outside or "")

    return rename
