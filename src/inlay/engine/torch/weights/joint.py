"""All layers of a Llama-like model as one list of native calls, for few positions on a CPU.

Beside the weights that stream through the caches, what Python and torch do between two products
costs more than what they compute. The kernels are those that the modules call, in their order, so
the bits are the modules'.
"""

from collections.abc import Callable, Collection, Mapping
from ctypes import addressof
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import Scoring, WithLargestWindow
from inlay.engine.torch.native import Kernels
from inlay.engine.torch.native.calls import with_tensors
from inlay.engine.torch.native.integers import BlockProduct
from inlay.engine.torch.native.kernels import Call
from inlay.engine.torch.weights.fused import FusedAttention, FusedGated
from inlay.engine.torch.weights.linear import RMSNorm
from inlay.engine.torch.weights.linear_methods import BlockLinear

NAME = "layers in one call"
"""Of a `JointBody` among the modules that a check at start may leave out."""

_BODIES = frozenset({"Gemma3TextModel", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
"""transformers modules: layers of x + attention(norm(x)) and x + gated(norm(x)), and a norm.

Gemma's norm what attention and the gated part give too, before it is added.
"""

MOST = 64
"""Positions of a step; for more, what is saved is little."""


class Found(NamedTuple):
    """Output of a body.

    Attributes:
        last_hidden_state: [1, T, C], after the last norm.
    """

    last_hidden_state: Tensor


class _Layer(NamedTuple):
    """A layer.

    Attributes:
        norms: of attention, and of the gated part: of what goes in, and, if any, of what comes out.
        attention: its attention.
        products: of which the last two are of the gated part.
        gelu: as of `FusedGated`.
        rope: arguments of its rotary embedding, after the positions.
    """

    norms: tuple[list[RMSNorm], list[RMSNorm]]
    attention: FusedAttention
    products: list[BlockProduct]
    gelu: bool
    rope: tuple[str, ...]


class JointBody:
    """The body of a model, of which a step of few positions is one native call.

    Attributes:
        apart: the modules run instead.
        proven: a check has seen the bits of the modules, in this start or an earlier one.
        difference: largest, of an element, that a check has seen from them.
    """

    def __init__(self, body: Any, kernels: Kernels, layers: list[_Layer]) -> None:
        """Take `layers`, which are those of `body`."""
        self._body, self._kernels, self._layers = body, kernels, layers
        self._watched: list[nn.Module] = [body]
        for layer in body.layers:
            self._watched += [layer, layer.self_attn, layer.mlp]
        self._plan: _Plan | None = None
        self.apart, self.proven = False, False
        self.difference = 0.0

    def __call__(
        self, *, inputs_embeds: Tensor, position_ids: Tensor, paged: Any, **more: Any
    ) -> Any:
        """Compute as the body: [1, T, C] to an output with `last_hidden_state`."""
        rows, own = inputs_embeds.shape[1], paged
        narrowed: Callable[[Scoring], Scoring] | None = None
        if type(paged) is WithLargestWindow:
            own, narrowed = paged.paged, paged.narrowed
        if self.apart or not (
            type(own) is NativeAttention
            and rows == len(own.slots[0]) <= MOST
            and more.keys() <= {"use_cache"}
            and not any(each._forward_hooks or each._forward_pre_hooks for each in self._watched)
        ):
            return self._body(
                inputs_embeds=inputs_embeds, position_ids=position_ids, paged=paged, **more
            )
        if self._plan is None or self._plan.kind != (rows, torch.get_num_threads()):
            self._plan = _Plan(self._kernels, self._layers, self._body.norm, inputs_embeds[0])
        angles = {
            rope: self._body.rotary_emb(inputs_embeds, position_ids, *rope)
            for rope in {layer.rope for layer in self._layers}
        }
        return Found(self._plan.run(inputs_embeds[0], angles, own, narrowed)[None])


class _Plan:
    """The calls of a step, in memory of their own.

    Attributes:
        kind: positions of the step, and threads.
    """

    def __init__(self, kernels: Kernels, layers: list[_Layer], last: RMSNorm, like: Tensor) -> None:
        """Prepare calls for inputs [T, C] of the shape and dtype of `like`."""
        self.kind = len(like), torch.get_num_threads()
        self._kernels, self._layers, self._dtype = kernels, layers, like.dtype
        project, out, gate_up, _ = layers[0].products
        heads = layers[0].attention.query_heads

        def memory(*shape: int) -> Tensor:
            return like.new_empty(len(like), *shape)

        self._x, normed, change, ended = (memory(like.shape[1]) for _ in range(4))
        self._projected, gates = memory(project.outputs), memory(gate_up.outputs)
        self._query, self._attended = (memory(heads, out.inputs // heads) for _ in range(2))
        gated = memory(gate_up.outputs // 2)
        pairs = (
            (normed, self._projected),
            (self._attended, change),
            (normed, gates),
            (gated, change),
        )
        # Those that depend on the batch are put in place by `run`.
        calls: list[tuple[int | None, Any]] = []
        self._prepares: list[int] = []
        addend: Tensor | None = None
        for layer in layers:
            first, second, third, fourth = (
                (product.kernel(like.dtype), product.call(*pair))
                for product, pair in zip(layer.products, pairs, strict=True)
            )
            prepare, attend = self._named("prepare", None), self._named("attention", None)
            gate = self._named("gate", kernels.gate_call(gates, gated, gelu=layer.gelu))
            # After the first norm and product.
            self._prepares.append(len(calls) + 2)
            parts = (first, prepare, attend, second), (third, gate, fourth)
            for (norm, *ends), part in zip(layer.norms, parts, strict=True):
                calls += [self._norm(norm, self._x, addend, normed), *part]
                addend = change
                for end in ends:
                    calls.append(self._norm(end, change, None, ended))
                    addend = ended
        calls.append(self._norm(last, self._x, addend, normed))
        # Held, as their memory is only pointed to.
        self._kept = calls, normed, change, ended, gates, gated
        self._last = calls[-1][1]
        self._calls = (Call * len(calls))(
            *(Call(kernel, None if call is None else addressof(call)) for kernel, call in calls)
        )

    def _named(self, name: str, call: Any) -> tuple[int | None, Any]:
        return self._kernels.kernel(name, self._dtype), call

    def _norm(
        self, norm: RMSNorm, x: Tensor, addend: Tensor | None, out: Tensor
    ) -> tuple[int | None, Any]:
        call = self._kernels.norm_call(x, addend, norm.weight, norm.eps, out)
        return self._named("add_and_norm", call)

    def run(
        self,
        x: Tensor,
        angles: Mapping[tuple[str, ...], tuple[Tensor, Tensor]],
        paged: NativeAttention,
        narrowed: Callable[[Scoring], Scoring] | None,
    ) -> Tensor:
        """Compute [T, C] to [T, C]; `angles` are cosines and sines [1, T, R] of each `rope`."""
        self._x.copy_(x)
        out = torch.empty_like(self._x)
        self._last.out = out.data_ptr()
        kernels, pages = self._kernels, paged.pages
        made: list[tuple[Any, Any]] = []
        # Of kinds of layers, whose others differ in pages and norms alone: structures are copied,
        # as to make them takes longer than two of the products.
        firsts: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        needed = 0
        for layer in self._layers:
            attention = layer.attention
            keys, values = pages.keys[attention.layer], pages.values[attention.layer]
            scoring = attention.scoring if narrowed is None else narrowed(attention.scoring)
            shape = paged.shape(attention.layer, scoring.window)
            kind = (
                id(shape), keys.shape, attention.norms is None, attention.eps, scoring.scaling,
                scoring.softcap, id(scoring.sinks), layer.rope,
            )  # fmt: skip
            if kind not in firsts:
                prepare = kernels.prepare_call(
                    self._projected, *angles[layer.rope], attention.norms, attention.eps,
                    paged.slots[attention.layer], keys, values, self._query,
                )  # fmt: skip
                attend = kernels.attention_call(
                    self._attended, self._query, keys, values, shape, scoring.scaling,
                    scoring.softcap or 0.0, scoring.sinks,
                )  # fmt: skip
                firsts[kind] = prepare, attend
                needed = max(needed, kernels.attention_bytes(self._dtype, attend))
            prepare, attend = (
                with_tensors(call, keys=keys, values=values) for call in firsts[kind]
            )
            if attention.norms is not None:
                prepare.query_norm, prepare.key_norm = (x.data_ptr() for x in attention.norms)
            made.append((prepare, attend))
        workspace = paged.scratch(needed).data_ptr()
        for at, (prepare, attend) in zip(self._prepares, made, strict=True):
            attend.workspace = workspace
            self._calls[at].argument, self._calls[at + 1].argument = (
                addressof(prepare), addressof(attend),
            )  # fmt: skip
        kernels.run(self._calls)
        return out


def joint(body: Any, kernels: Kernels | None, left_out: Collection[str] | None) -> Any:
    """Return what computes as `body`: in one native call where its layers are known, or itself.

    `left_out` names what an earlier start found to differ; None: there was none.
    """
    if kernels is None or type(body).__name__ not in _BODIES or NAME in (left_out or ()):
        return body
    layers = []
    for layer in body.layers:
        attention, gated = layer.self_attn, layer.mlp
        if not (isinstance(attention, FusedAttention) and isinstance(gated, FusedGated)):
            return body
        norms = [layer.input_layernorm], [layer.post_attention_layernorm]
        rope: tuple[str, ...] = ()
        if hasattr(layer, "pre_feedforward_layernorm"):
            norms = (
                [layer.input_layernorm, layer.post_attention_layernorm],
                [layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm],
            )
            rope = (body.config.layer_types[attention.layer],)
        linears = attention.project, attention.out, gated.gate_up, gated.down
        products = [each.native for each in linears if isinstance(each, BlockLinear)]
        found = [product for product in products if product is not None]
        if len(found) < len(linears) or not all(
            isinstance(norm, RMSNorm) for norm in chain(*norms)
        ):
            return body
        layers.append(_Layer(norms, attention, found, gated.gelu, rope))
    if not isinstance(body.norm, RMSNorm):
        return body
    whole = JointBody(body, kernels, layers)
    whole.proven = left_out is not None
    return whole
