"""Numbers of a model's own code in transformers, and how much of them is rounding.

One pass computes every prompt several times: as it is; twice with the outputs of linears and norms
changed by at most half a unit in the last place (`free`: the changes add up through the model);
and, of decoders, with such changes but every layer's input as it is (`forced`: the changes of one
layer). Queries and keys of decoders are changed too, where attention takes them. The distance of
these is the noise of a position, found without another dtype and without twice the memory (Higham,
Accuracy and Stability of Numerical Algorithms, chapter 2, has the model of rounding).

Shapes: V variants, K prompts, T positions of a prompt, P = K * T, C hidden size, M logits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from inlay.engine.pool_reference import KEPT, PoolReference
from inlay.engine.torch.self_check.prompts import COUNT, WINDOW, CheckPrompt, check_prompts
from inlay.engine.torch.weights.division import head_of

VARIANTS = 3
"""Prompts as they are, and two `free` ones; where layers are compared, there is a `forced` one."""

_EVERY, _MOST_ROWS = 5, 64
"""Of modules, inputs and outputs at every fifth position are kept, so many rows at most."""

JITTER = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative change of an element.

Half a unit in the last place; in float32, whose sums round more than their result does, more.
"""

_HEAD = "lm_head"
"""Name of the head in every causal language model that is served."""

_SAMPLED, TOP = 512, 20
"""Logits that are compared: some of the same ids everywhere, and the largest at each position."""


def rounding_of(dtype: torch.dtype, activations: str) -> torch.dtype:
    """Return the dtype that the numbers of a model of `dtype` are as coarse as.

    Activations that products take in eight bits (`activations`, of `CausalModel`) are as coarse as
    bfloat16: rounded otherwise, one moves by 2^-8 of the largest beside it.
    """
    return torch.bfloat16 if activations else dtype


def relative(found: Tensor, expected: Tensor, size: Tensor) -> Tensor:
    """Return |found - expected| / |size|, root mean squares of rows [..., N]."""
    error = (found.float() - expected.float()).norm(dim=-1)
    ratio: Tensor = error / size.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ratio


def sampled_ids(vocab_size: int) -> Tensor:
    """Return the ids whose logits are compared at every position."""
    generator = torch.Generator().manual_seed(4)
    return torch.randperm(vocab_size, generator=generator)[:_SAMPLED]


def centred(logits: Tensor) -> Tensor:
    """Return some logits [..., M] less their mean, to which a softmax is blind."""
    found = logits.float()
    return found - found.mean(-1, keepdim=True)


class Heads(NamedTuple):
    """Outputs of one layer's attention [P, Q, E], before its last product, and noise [P, Q]."""

    outputs: Tensor
    noise: Tensor


@dataclass(slots=True)
class Layers:
    """Of each decoder layer: inputs and outputs [P, C], and noise [P] over what it adds.

    And the heads of those that attend, by index.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    noise: list[Tensor] = field(default_factory=list)
    heads: dict[int, Heads] = field(default_factory=dict)

    def moved(self, device: torch.device) -> "Layers":
        """Return the same on `device`."""
        inputs, outputs, noise = (
            [part.to(device) for part in parts] for parts in (self.inputs, self.outputs, self.noise)
        )
        heads = {at: Heads(*(part.to(device) for part in own)) for at, own in self.heads.items()}
        return Layers(inputs, outputs, noise, heads)


class Scores(NamedTuple):
    """Logits of a head [K, L], one row for each prompt, and how far rounding moves a typical one.

    The noise is relative to the size of each of the L logits.
    """

    values: Tensor
    noise: float


@dataclass(slots=True)
class Reference:
    """Results of a model's own code.

    Attributes:
        prompts: of the check.
        by: library, version, attention and dtype that computed it.
        ids: [P, M] int64, whose logits are compared.
        logits: float32 [P, M], centred.
        noise: float32 [P], root mean square distance of the `free` variants.
        routed: experts are chosen, which rounding may change.
        layers: of decoder layers; empty if they are not known.
        pooled: the reference of its pool, encoded; empty of models that have none.
        states: of a model that embeds [V, P, C], or its logits [V, K, L]: of what clients can
            send, from which `pooled` is made; else None.
        modules: rows of the inputs [R, in] and outputs [R, out] of linears and norms, by path.
        scores: of models that score; else None.
    """

    prompts: tuple[CheckPrompt, ...]
    by: str
    ids: Tensor
    logits: Tensor
    noise: Tensor
    routed: bool = False
    layers: Layers = field(default_factory=Layers)
    pooled: bytes = b""
    modules: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scores: Scores | None = None
    states: Tensor | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        directory: Path,
        max_model_len: int,
        *,
        axes: int,
        rows: bool,
        draw: int = 0,
        activations: str = "",
    ) -> "Reference":
        """Run the model's own code; layers with a sliding window see `WINDOW` positions at most.

        Args:
            model: causal language model as transformers made it, on its device.
            directory: its files.
            max_model_len: positions that it is served with.
            axes: numbers of a position.
            rows: it takes embedding vectors.
            draw: of its prompts.
            activations: as of `CausalModel`.
        """
        rounding = rounding_of(model.dtype, activations)
        vocab_size: int = model.config.get_text_config().vocab_size
        prompts = check_prompts(directory, vocab_size, max_model_len, rows=rows, draw=draw)
        layers = getattr(model.base_model, "layers", ())
        capture = Capture(model, layers, len(prompts), rounding=rounding)
        with torch.inference_mode(), as_published(model, WINDOW) as attention:
            with capture.hooked():
                hidden = _hidden(model, prompts, axes, capture.variants)
            first, *free = (_head(model, part) for part in hidden[:VARIANTS])
            common = sampled_ids(vocab_size).to(first.device).expand(len(first), -1)
            ids = torch.cat([common, first.topk(min(TOP, vocab_size)).indices], -1)
            logits = centred(first.gather(1, ids))
            moved = [relative(centred(own.gather(1, ids)), logits, logits) for own in free]
            noise = torch.stack(moved).square().mean(0).sqrt()
            capture.keep_head(hidden[0])
        by = computed_by(attention, model.dtype)
        return cls(
            prompts,
            by,
            ids,
            logits,
            noise,
            has_experts(model.config.get_text_config()),
            capture.layers,
            _pool_reference(model, directory, rounding, axes=axes).encode(),
            capture.modules,
        )

    def moved(self, device: torch.device) -> "Reference":
        """Return the same on `device`, where the model is that it is compared with."""
        ids, logits, noise = (part.to(device) for part in (self.ids, self.logits, self.noise))
        return replace(self, ids=ids, logits=logits, noise=noise)


def _pool_reference(
    model: Any, directory: Path, rounding: torch.dtype, *, axes: int
) -> PoolReference:
    """Run the model's own code with its own windows, at positions without gaps."""
    vocab_size: int = model.config.get_text_config().vocab_size
    prompts = check_prompts(directory, vocab_size, COUNT, rows=False)
    prompts = tuple(prompt._replace(positions=tuple(range(COUNT))) for prompt in prompts)
    capture = Capture(model, (), len(prompts), keeps=False, rounding=rounding)
    with torch.inference_mode(), as_published(model) as attention, capture.hooked():
        hidden = _hidden(model, prompts, axes, capture.variants)
        first, *others = (_head(model, part).log_softmax(-1) for part in hidden)
    kept = first.topk(min(KEPT, vocab_size))
    likely = kept.indices[:, :TOP]
    exact = first.gather(1, likely)
    changes = [(other.gather(1, likely) - exact).square().mean(-1).sqrt() for other in others]
    return PoolReference(
        by=computed_by(attention, model.dtype),
        dtype=str(model.dtype).removeprefix("torch."),
        prompts=tuple((prompt.kind, prompt.ids) for prompt in prompts),
        ids=kept.indices.int().cpu().numpy().tobytes(),
        logprobs=kept.values.cpu().numpy().tobytes(),
        noise=torch.stack(changes).amax(0).cpu().numpy().tobytes(),
        routed=has_experts(model.config.get_text_config()),
    )


def computed_by(attention: str, dtype: torch.dtype) -> str:
    """Return the name of what computed a reference."""
    name = str(dtype).removeprefix("torch.")
    return f"transformers {transformers.__version__} {attention} {name}"


def has_experts(config: Any) -> bool:
    """Return True if positions choose experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)


def model_width(model: Any) -> int:
    """Return the elements of a hidden state."""
    width: int = model.config.get_text_config().hidden_size
    return width


def _head(model: Any, hidden: Tensor) -> Tensor:
    """Compute float32 logits [P, vocabulary] of hidden states [P, C]."""
    logits: Tensor = head_of(model)(inputs_embeds=hidden[None]).logits[0]
    return logits.float()


def _hidden(model: Any, prompts: Sequence[CheckPrompt], axes: int, variants: int) -> Tensor:
    """Compute the last hidden states of all variants [V, P, C]."""
    body, device = model.base_model, model.device
    size = variants * len(prompts)
    given: dict[str, Tensor] = {}
    if any(prompt.others for prompt in prompts):
        table = body.get_input_embeddings()
        embeds = torch.stack([prompt.embedded(table, device) for prompt in prompts])
        given["inputs_embeds"] = embeds.repeat(variants, 1, 1)
    else:
        ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
        given["input_ids"] = ids.repeat(variants, 1)
    places = torch.tensor([prompt.positions for prompt in prompts], device=device)
    places = places.repeat(variants, 1)
    found: Tensor = body(
        **given,
        position_ids=places if axes == 1 else places.expand(axes, size, COUNT),
        # Without it, a jump of positions would begin a packed sequence.
        attention_mask=torch.ones(size, COUNT, dtype=torch.int64, device=device),
        use_cache=False,
    ).last_hidden_state
    return found.view(variants, -1, found.shape[-1])


@contextmanager
def as_published(model: Any, largest_window: int | None = None) -> Iterator[str]:
    """Give a model attention of transformers, and windows of at most so many positions.

    Yields the name of the attention.
    """
    config = model.config.get_text_config()
    # SDPA knows neither soft caps nor sinks. Elsewhere it rounds less than eager attention.
    eager = (
        getattr(config, "attn_logit_softcapping", None) is not None
        or not getattr(model, "_supports_sdpa", True)
        or any(hasattr(module, "sinks") for module in model.modules())
    )
    name = "eager" if eager else "sdpa"
    # Itself alone: through its property, a configuration changes those inside.
    configs = {id(each): each for each in (config, *_configs(model))}.values()
    before = [each._attn_implementation_internal for each in configs]
    window = None if largest_window is None else getattr(config, "sliding_window", None)
    try:
        for each in configs:
            each._attn_implementation_internal = name
        if window is not None and largest_window is not None:
            config.sliding_window = min(window, largest_window)
        yield name
    finally:
        for each, implementation in zip(configs, before, strict=True):
            each._attn_implementation_internal = implementation
        if window is not None:
            config.sliding_window = window


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            yield config


class Capture:
    """Hooks that change variants of a pass, and keep what modules and layers are given."""

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[nn.Module],
        prompts: int,
        *,
        keeps: bool = True,
        rounding: torch.dtype | None = None,
    ) -> None:
        """`rounding`: as `rounding_of` has it; each tensor's own dtype unless given."""
        self._keeps = keeps
        self._rounding = rounding
        self._root = root
        self._layers = list(layers)
        self._positions = prompts * COUNT
        self.variants = VARIANTS + bool(self._layers)
        self._sequences = prompts * self.variants
        self._generator = torch.Generator().manual_seed(3)
        self._last: tuple[Tensor, Tensor] | None = None
        self.layers = Layers()
        self.modules: dict[str, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install the hooks within this context."""
        with ExitStack() as undo:
            if self._layers:
                undo.enter_context(self._attending())
            for path, module in self._root.named_modules():
                # Not a subclass, which may give more (the router of Llama 4's experts).
                if type(module) is nn.Linear or type(module).__name__.endswith("Norm"):
                    undo.callback(module.register_forward_hook(self._module(path)).remove)
            for layer in self._layers:
                before = layer.register_forward_pre_hook(self._before, with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(layer.register_forward_hook(self._after).remove)
            yield
        self._last = None

    def keep_head(self, hidden: Tensor) -> None:
        """Keep rows of the head's product, given states [P, C]."""
        head = getattr(self._root, _HEAD, None)
        if isinstance(head, nn.Linear):
            given = hidden[::_EVERY].clone()
            self.modules[_HEAD] = given, head(given)

    def _module(self, path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], found: Any) -> Tensor | None:
            # Routers, some of which are called norms or linears, return several things.
            own = self._variants(found.contiguous()) if isinstance(found, Tensor) else None
            if own is None:
                return None
            if self._keeps:
                self._keep(path, given[0], own)
            # One random change of each channel, and one sign of each row.
            size, number = own.shape[-1], self.variants - 1
            changes = self._changes(number, 1, 1, size, dtype=own.dtype)
            signs = torch.randint(2, (number, *own.shape[1:-1], 1), generator=self._generator)
            factors = 1 + changes.to(own.device) * (2 * signs - 1).to(own.device)
            own[1:].copy_(own[1:] * factors)
            return own.view_as(found)

        return hook

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Change queries and keys where attention takes them: rotating has rounded them too."""
        usual = AttentionInterface.get_interface
        own = {*self._root.modules()}

        def get_interface(interface: Any, name: str, default: Any) -> Any:
            compute = usual(interface, name, default)

            def attention(module: Any, q: Tensor, k: Tensor, *given: Any, **named: Any) -> Any:
                if module not in own:
                    return compute(module, q, k, *given, **named)
                found = compute(module, self._rotated(q), self._rotated(k), *given, **named)
                if (variants := self._variants(found[0].flatten(2))) is not None:
                    heads = variants.view(*variants.shape[:2], *found[0].shape[2:])
                    noise = relative(heads[-1], heads[0], heads[0])
                    self.layers.heads[module.layer_idx] = Heads(heads[0].clone(), noise)
                return found

            return attention

        setattr(AttentionInterface, "get_interface", get_interface)  # noqa: B010
        try:
            yield
        finally:
            setattr(AttentionInterface, "get_interface", usual)  # noqa: B010

    def _rotated(self, heads: Tensor) -> Tensor:
        """Return queries or keys [V * K, H, T, D], each element of the variants changed."""
        if len(heads) != self._sequences or heads.shape[2] != COUNT:
            return heads
        first = self._sequences // self.variants
        changes = self._changes(*heads[first:].shape, dtype=heads.dtype)
        return torch.cat(
            [heads[:first], (heads[first:] * (1 + changes.to(heads.device))).to(heads)]
        )

    def _changes(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Draw relative changes of elements of `dtype`, float32 [shape]."""
        most = JITTER[self._rounding or dtype]
        return (2 * torch.rand(shape, generator=self._generator) - 1) * most

    def _variants(self, tensor: Tensor) -> Tensor | None:
        """Return [V, P, ..., N]; None where rows are not positions, as in some experts."""
        sequences = len(tensor) == self._sequences and tensor.shape[1] == COUNT
        if not sequences and len(tensor) != self.variants * self._positions:
            return None
        return tensor.reshape(self.variants, self._positions, -1, tensor.shape[-1])

    def _keep(self, path: str, given: Tensor, found: Tensor) -> None:
        """Keep rows of a module; those of an input that several have, once."""
        if self._last is not None and self._last[0] is given:
            rows = self._last[1]
        else:
            own = self._variants(given)
            if own is None or own.shape[:-1] != found.shape[:-1]:
                return
            rows = _rows(own)
            self._last = given, rows
        self.modules[path] = rows, _rows(found)

    def _before(
        self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden: Tensor = given[0] if given else named["hidden_states"]
        variants = hidden.view(self.variants, self._positions, -1)
        self.layers.inputs.append(variants[0].clone())
        own = torch.cat([variants[:-1], variants[:1]]).view_as(hidden)
        if given:
            return (own, *given[1:]), named
        return given, {**named, "hidden_states": own}

    def _after(self, layer: nn.Module, given: Any, found: Any) -> None:
        hidden: Tensor = found[0] if isinstance(found, tuple) else found
        variants = hidden.view(self.variants, self._positions, -1)
        added = variants[0].float() - self.layers.inputs[-1].float()
        self.layers.outputs.append(variants[0].clone())
        self.layers.noise.append(relative(variants[-1], variants[0], added))


def _rows(variants: Tensor) -> Tensor:
    """Return rows [R, N] of the first variant of [V, P, ..., N]."""
    return variants[0, ::_EVERY].flatten(0, 1)[:_MOST_ROWS].clone()
