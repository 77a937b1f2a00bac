"""Image features of the language model: tower and projector, for several images at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.torch.batch import DEEPSTACK
from inlay.engine.torch.media.processing import collate
from inlay.messages.prompt import Buffer, RowField, Rows

ROWS = "rows"
"""Name of the rows in the arrays of an image; inner features are `deepstack.0` and so on."""

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays [rows, hidden size] of one image."""


class Tower:
    """A vision-language model's body without its language model.

    Used by one thread. On a GPU it has a stream of its own, so that steps of the language model are
    not queued behind it; not run on a GPU yet.

    Attributes:
        body: as given.
        dtype: of the rows.
        hidden_size: elements of a row.
    """

    def __init__(self, body: Any, hidden_size: int) -> None:
        self.body = body
        first = next(body.parameters())
        self._device: torch.device = first.device
        on_gpu = first.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype = first.dtype
        self.hidden_size = hidden_size

    def encode(
        self, inputs: Sequence[dict[str, Tensor]], counts: Sequence[int]
    ) -> list[Arrays | InlayError]:
        """Compute the rows of some images together.

        Args:
            inputs: of the tower, one of `ImageProcessor` for each image.
            counts: rows that each image must have.

        Returns:
            For each image its arrays, or an error of its own: if the images fail together, each is
            tried alone.
        """
        try:
            return [*self._together(inputs, counts)]
        except (InlayError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if len(inputs) == 1:
                if isinstance(error, InlayError):
                    return [error]
                return [EngineError(f"the file could not be encoded: {error}")]
        return [
            found
            for one, count in zip(inputs, counts, strict=True)
            for found in self.encode([one], [count])
        ]

    def features(self, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Compute named rows [N, C] of some images together, on the device.

        To be called in inference mode.
        """
        joined = collate(list(inputs))
        name = next(name for name in _FEATURES if name in joined)
        joined[name] = joined[name].to(self.dtype)
        there = {name: part.to(self._device) for name, part in joined.items()}
        if not hasattr(self.body, _FEATURES[name]):
            output = _masked_audio(self.body, **there)
        else:
            output = getattr(self.body, _FEATURES[name])(**there, return_dict=True)
        levels = {ROWS: _flat(_projected(self.body, output))}
        for index, level in enumerate(getattr(output, "deepstack_features", None) or ()):
            levels[f"{DEEPSTACK}.{index}"] = _flat(level)
        return levels

    def _together(self, inputs: Sequence[dict[str, Tensor]], counts: Sequence[int]) -> list[Arrays]:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            levels = self.features(inputs)
            for name, rows in levels.items():
                if rows.shape != (sum(counts), self.hidden_size):
                    raise EngineError(
                        f"the encoder made {name} of shape {tuple(rows.shape)} where the prompt "
                        f"has room for ({sum(counts)}, {self.hidden_size})"
                    )
            finite = torch.stack([rows.isfinite().all() for rows in levels.values()]).all()
            if not finite:
                raise InvalidRequestError("the rows of an item are not finite")
            split = {
                name: torch.split_with_sizes(rows.to(self.dtype).cpu(), list(counts))
                for name, rows in levels.items()
            }
        return [
            {name: _array(parts[index]) for name, parts in split.items()}
            for index in range(len(counts))
        ]


_FEATURES = {
    "pixel_values": "get_image_features",
    "pixel_values_videos": "get_video_features",
    "input_features": "get_audio_features",
}
"""Methods of a body by the first of its inputs."""


def _masked_audio(body: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Any:
    """Return the features of Qwen2-Audio, whose body computes them within its `forward` alone.

    Each item attends to its own states, not to the silence after them.
    """
    states, counts = body.audio_tower._get_feat_extract_output_lengths(
        feature_attention_mask.sum(-1)
    )
    longest = (input_features.shape[-1] - 2) // 2 + 1
    heard = torch.arange(longest, device=states.device) < states[:, None]
    mask = create_bidirectional_mask(
        config=body.audio_tower.config,
        inputs_embeds=input_features.new_zeros(len(states), longest, 1),
        attention_mask=heard.long(),
    )
    found = body.audio_tower(input_features, attention_mask=mask)
    projected = body.multi_modal_projector(found.last_hidden_state)
    found.pooler_output = [rows[:count] for rows, count in zip(projected, counts, strict=True)]
    return found


def _projected(body: Any, output: Any) -> Any:
    """Return the features in the space of the language model.

    Llama 4 gives its states before the projector, all others give the projector's output.
    """
    if output.pooler_output is not None:
        return output.pooler_output
    return body.multi_modal_projector(output.last_hidden_state)


def _flat(found: Any) -> Tensor:
    """Return rows [N, C] of what families return: a tensor, or one for each image."""
    if not isinstance(found, Tensor):
        found = torch.cat([part.flatten(0, -2) for part in found])
    flat: Tensor = found.flatten(0, -2)
    return flat


def _array(rows: Tensor) -> npt.NDArray[Any]:
    """Return rows as an array of the same dtype."""
    if rows.dtype == torch.bfloat16:
        return rows.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return rows.contiguous().numpy()


def as_rows(arrays: Arrays, *, atomic: bool = False) -> Rows:
    """Return an image's arrays as rows with a bundle, sharing memory."""
    rows = arrays[ROWS]
    fields = tuple(
        RowField(name, _buffer(array), str(array.dtype), array.shape)
        for name, array in arrays.items()
        if name != ROWS
    )
    return Rows(_buffer(rows), str(rows.dtype), (rows.shape[0], rows.shape[1]), fields, atomic)


def _buffer(array: npt.NDArray[Any]) -> Buffer:
    return Buffer(array.view(np.uint8).data)
