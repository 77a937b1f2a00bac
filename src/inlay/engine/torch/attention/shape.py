"""Shape of what a layer keeps in pages."""

from typing import NamedTuple

from inlay.engine.torch.windows import Window

RECURRENT_WINDOW = 2
"""Window of a recurrent layer: a position needs its own page, and that of the one before it."""


class LayerShape(NamedTuple):
    """Keys and values that one attention layer stores per position, or a state.

    Attributes:
        window: positions that a position sees.
        num_heads: key and value heads.
        key_size: elements of a key head.
        value_size: elements of a value head.
        latent: a value is the first part of its key, and only the key is kept.
        state_size: of a recurrent layer, float32 elements of its state, which a page keeps in place
            of keys and values; they are then those of the model's attention layers.
    """

    window: Window
    num_heads: int
    key_size: int
    value_size: int
    latent: bool = False
    state_size: int = 0

    @property
    def kept(self) -> tuple[int, int, int]:
        """Heads, and elements that pages keep of a key head and of a value head."""
        return self.num_heads, self.key_size, 0 if self.latent else self.value_size

    @property
    def elements(self) -> int:
        """Elements stored per position, keys and values together."""
        heads, *sizes = self.kept
        return heads * sum(sizes)

    @property
    def page(self) -> "LayerShape":
        """The shape as far as it decides what a page is."""
        return self._replace(window=None, state_size=0)
