"""Hidden states in requests that generate, and in their answers."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from inlay.messages.fields import example, field

StatesPart: TypeAlias = Literal["prompt", "output", "all", "last"]
StatesFormat: TypeAlias = Literal["base64", "float", "safetensors", "ref"]


class HiddenStatesOptions(msgspec.Struct, frozen=True):
    """The hidden states that come with an answer.

    Attributes:
        layers: their numbers, as transformers has them: 0 is what the first layer reads, -1 (alone,
            as when absent) what comes behind the model's last norm.
        of: the positions. "prompt" (when absent) all of the prompt's, "last" its last one, "output"
            for each token of the answer that from which it was chosen, "all" the prompt's and those
            of "output".
        format: "base64" (when absent) of the elements in `dtype`, little endian; "float" numbers;
            "safetensors" base64 of a file that `prompt_embeds` takes; "ref" stores them as a prompt
            for another request.
        project: send them through the projector of the model's worker (--hidden-projector), which
            makes them rows of another model; false when absent.
    """

    layers: Annotated[list[int] | None, example([-1])] = None
    of: StatesPart | None = None
    format: StatesFormat | None = None
    project: bool | None = None


class LayerStates(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden states of one layer.

    Attributes:
        layer: its number, from 0.
        shape: number of positions, and elements of each.
        dtype: of the elements, as the model computed them.
        data: numbers, or base64 of the elements or of a file.
        ref: id of the stored prompt.
    """

    layer: Annotated[int, example(28)]
    shape: Annotated[tuple[int, int], example([4, 1536])]
    dtype: Annotated[str, example("bfloat16")]
    data: Annotated[str | list[list[float]] | msgspec.UnsetType, example("<base64>")] = (
        msgspec.UNSET
    )
    ref: Annotated[str | msgspec.UnsetType, example("pe-5d0f")] = msgspec.UNSET


ShownStates: TypeAlias = Annotated[
    list[LayerStates | float] | msgspec.UnsetType, field("those that the request asked for.")
]
"""Each layer's; under SGLang's `return_hidden_states` the elements of one vector."""
