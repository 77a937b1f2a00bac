"""The LoRA adapters vLLM holds."""

from itertools import count
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import Adapter
from inlay.messages.request import Request


class VllmAdapters:
    """vLLM's requests for adapters by the name clients use.

    vLLM keys its prefix cache by an adapter's own name and path: it is given the content's digest
    for a name, so that other weights under an old name never meet what was cached for those before.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}
        self._numbers = count(1)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def of(self, request: Request) -> Any:
        """VLLM's request for the adapter of `request`, or None."""
        return None if request.adapter is None else self._by_name[request.adapter]

    def content_id(self, name: str | None) -> str | None:
        """Content id of a loaded adapter; None of one that is not."""
        request = None if name is None else self._by_name.get(name)
        return None if request is None else str(request.lora_name)

    def request(self, adapter: Adapter, directory: str, lora: Any) -> Any:
        """A request for an adapter that is to be loaded.

        Raises `InvalidRequestError` where vLLM has no room for any.
        """
        if lora is None:
            raise InvalidRequestError(
                "the engine has no room for adapters: start it with --enable-lora"
            )
        if adapter.rank > lora.max_lora_rank:
            raise InvalidRequestError(
                f"the adapter's rank is {adapter.rank}; --max-lora-rank is {lora.max_lora_rank}",
                param="lora_path",
            )
        most = self.room(lora)
        if len(self._by_name) >= most:
            raise InvalidRequestError(
                f"{most} adapters are loaded, and that is all there is room for"
            )
        return LoRARequest(
            lora_name=adapter.content_id, lora_int_id=next(self._numbers), lora_path=directory
        )

    @staticmethod
    def room(lora: Any) -> int:
        """Adapters that may be loaded at a time.

        On a CPU vLLM 0.32 computes requests that are for no adapter with whatever is in the last
        slot (its torch operators take their index, -1, for the last), so that one stays empty.
        """
        most: int = lora.max_cpu_loras or lora.max_loras
        return min(most, lora.max_loras - 1) if current_platform.is_cpu() else most

    def add(self, name: str, request: Any) -> None:
        """Know one that was loaded."""
        self._by_name[name] = request

    def remove(self, name: str) -> int | None:
        """Forget one; vLLM's number of it, or None when it is not known."""
        request = self._by_name.pop(name, None)
        return None if request is None else int(request.lora_int_id)
