"""Token ids as the strings and bytes that logprobs show."""

from inlay.render import Renderer


class TokenNames:
    """What each id reads as, remembered."""

    __slots__ = ("_known", "_renderer")

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[int, str] = {}

    def text(self, id_: int) -> str:
        """The id alone, decoded; special tokens by name."""
        known = self._known.get(id_)
        if known is None:
            known = self._known[id_] = self._renderer.decode((id_,), skip_special_tokens=False)
        return known

    def data(self, id_: int) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(self.text(id_).encode())
