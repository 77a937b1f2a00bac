"""The shadow ring: a model's structure with small random weights in float32, before it is loaded.

Rounding in bfloat16 hides GELU by tanh for the exact one, an epsilon, a scale that is 1% off, two
channels that are exchanged. So the checkpoint's configuration is cut to a small size, with rope,
windows, soft caps, activations, epsilons, flags and sizes of heads as they are, and the engine's
model is compared with transformers' own code on the CPU.
"""

import copy
import json
import logging
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from inlay.engine.torch.attention.paged import IMPLEMENTATION
from inlay.engine.torch.self_check.judgement import grouped, logit_errors
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.weights.division import drop_tower_layers, split_tower
from inlay.engine.torch.weights.media_families import ImageFamily

if TYPE_CHECKING:
    from inlay.engine.torch.model import CausalModel

_logger = logging.getLogger(__name__)

_EACH, _MOST_LAYERS = 2, 16
"""Layers of each kind, and of all kinds together."""

SHADOW_BOUND = 1e-4
"""Relative distance of logits over which a structure differs: float32 rounds by 1e-6 to 2e-5."""

_POSITIONS = 8192
"""Positions at most over which prompts are spread: what turns slower hardly counts."""

_WIDTH = 256

_MOST = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 32,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "top_k_experts": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_global_key_value_heads": 1,
}
"""The largest value of each size that is cut."""

_HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
"""Heads and those that groups of them share."""

_INDICES = ("mlp_only_layers", "moe_layers")
"""Fields that say which layers have experts."""

_LOUDNESS = 0.03
"""Size of an element of an embedding: as in published tables, whose squares are near epsilons."""

_HEAD_NORMS = ("q_norm", "k_norm")
_QUERY_KEY = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj_with_mqa", "qkv_proj")


class Shadow(NamedTuple):
    """Result of comparing the structure of a model with its own code.

    Attributes:
        distance: typical relative distance of logits, in the group of positions where it is the
            largest; 1 if the engine cannot compute it, or not as numbers.
        place: that group.
    """

    distance: float
    place: str

    @property
    def right(self) -> bool:
        """True if float32's rounding explains the distance; not a number is not."""
        return self.distance <= SHADOW_BOUND


def shadow_of(
    kind: "type[CausalModel]", parsed: Any, family: ImageFamily, max_model_len: int, *, rows: bool
) -> Shadow | None:
    """Compare the structure of a model in the engine with that in transformers.

    Args:
        kind: the engine's model.
        parsed: transformers' configuration of the checkpoint; left as it is.
        family: of the model.
        max_model_len: positions that it is served with.
        rows: it takes embedding vectors.

    Returns:
        None where no such small model can be made, or where its own numbers are rounding.
    """
    try:
        with tempfile.TemporaryDirectory() as name:
            return _compared(kind, parsed, family, max_model_len, Path(name), rows=rows)
    except OSError as error:
        # A full disk must not keep a model from starting.
        _logger.warning("no small model of this structure is compared: %s", error)
        return None


def _compared(
    kind: "type[CausalModel]",
    parsed: Any,
    family: ImageFamily,
    max_model_len: int,
    directory: Path,
    *,
    rows: bool,
) -> Shadow | None:
    """As `shadow_of`; the embedding table is written into `directory`, which is empty."""
    last, axes = min(max_model_len, _POSITIONS), family.rope_axes
    try:
        model = small_model(parsed, family)
        _save_table(model, directory)
        reference = Reference.of(model, directory, last, axes=axes, rows=rows)
    except OSError:
        raise
    except Exception as error:  # transformers raises whatever it meets
        _logger.debug("no small model of this structure: %r", error)
        return None
    if not float(reference.noise.median()) <= SHADOW_BOUND:
        _logger.debug("the numbers of a small model of this structure are rounding")
        return None
    try:
        own = kind(model, None, family, directory, {}, last, ModuleCheck())
        return compare(own, reference)
    except Exception as error:  # the model itself is compared without faster modules then
        _logger.exception("a small model of this structure does not run")
        return Shadow(1.0, f"the engine raises {error!r}")


def compare(model: "CausalModel", reference: Reference) -> Shadow:
    """Compare a small model in the engine with the reference of its own code."""
    # The median: where experts are chosen, rounding may choose others at one position.
    return max(
        Shadow(float(error.nan_to_num(1.0, 1.0).median()), place)
        for place, error in grouped(reference, logit_errors(model, reference))
    )


def small_model(parsed: Any, family: ImageFamily) -> Any:
    """Return a float32 model of transformers with the structure of `parsed`, and random weights.

    Raises:
        Exception: whatever transformers raises where sizes do not go together.
    """
    config, text = copy.deepcopy(parsed), parsed.get_text_config()
    small = type(text).from_dict(_cut(text.to_dict()))
    if text is parsed:
        config = small
    else:
        config.text_config = small
        drop_tower_layers(config)
    config.__dict__.pop("quantization_config", None)
    own = IMPLEMENTATION if family.language is None else {"text_config": IMPLEMENTATION}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = getattr(transformers, family.architecture)._from_config(
            config, dtype=torch.float32, attn_implementation=own
        )
        model, _ = split_tower(whole, family)
        _draw(model.eval())
    return model


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a language model with few layers, heads and experts."""
    total = fields["num_hidden_layers"]
    kinds = [_kind(fields, index, total) for index in range(total)]
    kept = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < _EACH]
    kept = kept[:_MOST_LAYERS]
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _MOST and isinstance(value, int):
            cut[name] = min(value, _MOST[name])
        elif name in _INDICES and value:
            cut[name] = [index for index, old in enumerate(kept) if old in value]
        elif isinstance(value, list) and len(value) == total:
            cut[name] = [value[old] for old in kept]
        else:
            cut[name] = value
    cut["num_hidden_layers"] = len(kept)
    if fields.get("decoder_sparse_step"):
        dense = [index for index, old in enumerate(kept) if _is_dense(fields, old)]
        cut |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if first := fields.get("first_k_dense_replace"):
        cut["first_k_dense_replace"] = sum(old < first for old in kept)
    if shared := fields.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"] = sum(old >= total - shared for old in kept)
    for many, few in _HEADS:
        if isinstance(heads := cut.get(many), int):
            groups = cut.get(few) or heads
            left = min(groups, 4 if groups == heads else 2)
            cut |= {few: left, many: left * min(heads // groups, 2)}
    own_sizes = {int(old): own for old, own in (cut.get("per_layer_config") or {}).items()}
    if own_sizes:
        cut["per_layer_config"] = {
            index: {**own_sizes[old], **{name: min(own_sizes[old][name], 2) for name in few}}
            for index, old in enumerate(kept)
            if old in own_sizes
            for few in [own_sizes[old].keys() & {"num_key_value_heads"}]
        }
    # Not all families tell apart the size of a head and the share of it in the hidden state.
    if cut.get("head_dim") or cut.get("kv_lora_rank") or own_sizes:
        cut["hidden_size"] = min(fields["hidden_size"], _WIDTH)
    else:
        size = fields["hidden_size"] // fields["num_attention_heads"]
        cut["hidden_size"] = size * cut["num_attention_heads"]
    cut |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    cut.pop("quantization_config", None)
    return cut


def _kind(fields: dict[str, Any], index: int, total: int) -> tuple[Hashable, ...]:
    """Return what a configuration says of one layer."""
    lists = [
        repr(value[index])
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == total and name not in _INDICES
    ]
    return (
        *lists,
        _is_dense(fields, index),
        index in (fields.get("moe_layers") or ()),
        index < (fields.get("first_k_dense_replace") or 0),
        index >= total - (fields.get("num_kv_shared_layers") or 0),
    )


def _is_dense(fields: dict[str, Any], index: int) -> bool:
    step = fields.get("decoder_sparse_step") or 1
    return index in (fields.get("mlp_only_layers") or ()) or (index + 1) % step != 0


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Draw weights that tell apart what may be confused; none is the same for all channels."""
    for path, weight in [*model.named_parameters(), *model.named_buffers()]:
        place = path.rpartition(".")[0]
        if weight.ndim >= 2:
            if "conv" not in path:
                gain = 2.0 if place.endswith(_QUERY_KEY) else 1.0
                weight.normal_(0, gain / weight.shape[-1] ** 0.5)
        elif bool((weight == (first := weight.flatten()[0])).all()) and weight.is_floating_point():
            # As it was initialised: norms, biases, scales, sinks.
            adds = float(first) == 0
            if place.endswith("norm"):
                drawn = 0.4 + 1.2 * torch.rand_like(weight)
                if place.endswith(_HEAD_NORMS):
                    parent: Any = model.get_submodule(place.rpartition(".")[0])
                    scaling = getattr(parent, "scaling", len(weight) ** -0.5)
                    drawn *= (2 / (len(weight) ** 0.5 * scaling)) ** 0.5
                else:
                    if ".layers." not in place:
                        # Logits of some size, so that soft caps of them count.
                        drawn *= 20
                    drawn[[len(weight) // 3, len(weight) // 2]] *= 4
                weight.copy_(drawn - 1 if adds else drawn)
            else:
                weight.copy_(torch.randn_like(weight) * 0.3 + first)
    body: Any = model.base_model
    table = body.get_input_embeddings()
    table.weight.mul_(_LOUDNESS / table(torch.arange(16)).std())
    table.weight[:, [3, 7]] *= 5


def _save_table(model: Any, directory: Path) -> None:
    """Write what the engine reads of a directory: the configuration and the embedding table."""
    text = model.config.get_text_config()
    config = {"model_type": text.model_type, "hidden_size": text.hidden_size}
    (directory / "config.json").write_text(json.dumps(config))
    table = model.base_model.get_input_embeddings().weight.detach()
    save_file({"model.embed_tokens.weight": table}, directory / "model.safetensors")
