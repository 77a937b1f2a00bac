"""Texts that a model of pages (ColQwen2) is given, as in its training.

So colpali-engine and transformers 4.53 write them; 5.23 ends queries with a line break, which the
published weights have not seen.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import config_of, json_of

ARCHITECTURE = "ColQwen2ForRetrieval"

_QUERY = "Query: "
_PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
_IMAGE = "<|image_pad|>"
_PADDING = "<|endoftext|>"
_BUFFERS = 10
"""Padding tokens behind a query, whose vectors take part in its score."""

_TOKENS = r"(?:<\|\w+\|>)*"
_PARTS = re.compile(rf"(.*?)({_TOKENS}{re.escape(_IMAGE)}{_TOKENS})(.*?)({_TOKENS})", re.DOTALL)

_TEMPLATE = """\
{{%- if messages | length != 1 or messages[0].role != 'user' -%}}
{{{{ raise_exception('a chat of this model is one message of the user: a page, or a query') }}}}
{{%- endif -%}}
{{%- set given = messages[0].content -%}}
{{%- set parts = [{{'type': 'text', 'text': given}}] if given is string else given -%}}
{{%- set texts = parts | selectattr('type', 'equalto', 'text') | map(attribute='text') | list -%}}
{{%- set images = parts | length - texts | length -%}}
{{%- if images > 1 -%}}
{{{{ raise_exception('a page is one image') }}}}
{{%- elif images -%}}
{{{{ {before} }}}}
{{%- for part in parts %}}{{{{ part.text if part.type == 'text' else {image} }}}}{{% endfor -%}}
{{{{ '' if texts else {said} }}}}{{{{ {after} }}}}
{{%- else -%}}
{{{{ {query} + texts | join('\\n') + {suffix} }}}}
{{%- endif -%}}
"""


@dataclass(frozen=True, slots=True)
class PagePrompts:
    """Texts of one model.

    Attributes:
        query: before a query.
        suffix: behind it.
        page: around the placeholder of a page's image.
    """

    query: str
    suffix: str
    page: str

    @classmethod
    def of(cls, directory: Path) -> "PagePrompts | None":
        """Read the processor's settings; None of a directory whose model takes no pages.

        Raises:
            InvalidRequestError: a file that cannot be read, or a text without one image.
        """
        if json_of(directory, "config.json") is None:
            return None
        if ARCHITECTURE not in (config_of(directory).get("architectures") or ()):
            return None
        name = "processor_config.json"
        said = _object_of(directory, name)
        query, page = said.get("query_prefix") or _QUERY, said.get("visual_prompt_prefix") or _PAGE
        if not isinstance(query, str) or not isinstance(page, str) or page.count(_IMAGE) != 1:
            raise InvalidRequestError(
                f"{directory / name}: query_prefix and visual_prompt_prefix are texts, the second "
                f"with {_IMAGE} once",
                param="model",
            )
        padding = _object_of(directory, "tokenizer_config.json").get("pad_token") or _PADDING
        padding = padding.get("content") if isinstance(padding, dict) else padding
        if not isinstance(padding, str):
            raise InvalidRequestError(
                f"{directory / 'tokenizer_config.json'}: pad_token is no text", param="model"
            )
        return cls(query, padding * _BUFFERS, page)

    def template(self) -> str:
        """Return a chat template that writes a page or a query, in a message of the user.

        Texts beside an image stand in place of what the model's own text says of it.
        """
        parts = _PARTS.fullmatch(self.page)
        assert parts is not None, "the text has an image"
        before, image, said, after = map(repr, parts.groups())
        return _TEMPLATE.format(
            before=before, image=image, said=said, after=after, query=repr(self.query),
            suffix=repr(self.suffix),
        )  # fmt: skip


def _object_of(directory: Path, name: str) -> dict[str, Any]:
    found = json_of(directory, name) or {}
    if not isinstance(found, dict):
        raise InvalidRequestError(
            f"{directory / name} holds {type(found).__name__}, not an object", param="model"
        )
    return found
