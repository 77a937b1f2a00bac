"""A reference that is kept: later starts with the same weights need not run the model's own code.

It depends on nothing of ours but the prompts, so it is found by what determines it: weights, dtype,
library, context length.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from blake3 import blake3
from torch import Tensor

import inlay
from inlay.engine.references import References, references
from inlay.engine.torch.native import kernels
from inlay.engine.torch.native.sources import cpu_features
from inlay.engine.torch.self_check.prompts import COUNT, CheckPrompt
from inlay.engine.torch.self_check.reference import Reference, Scores

_logger = logging.getLogger(__name__)

_FORM = 6
"""Changes with the prompts, with what is compared and with the form of the file."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a model's own code for the prompts of the check, and what was compared here.

    Attributes:
        by: as in `Reference`.
        prompts: likewise.
        ids: int32 [P, M], as bytes.
        logits: float32 [P, M].
        noise: float32 [P].
        routed: as in `Reference`.
        pooled: likewise.
        compared_by: release and machine that compared modules.
        num_modules: how many it compared.
        left_out: paths of modules that differed there.
        scores: float32 [K, L], and their noise; None of models that do not score.
    """

    by: str
    prompts: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    ids: bytes
    logits: bytes
    noise: bytes
    routed: bool
    pooled: bytes
    compared_by: str
    num_modules: int
    left_out: tuple[str, ...]
    scores: tuple[bytes, float] | None = None

    @classmethod
    def of(
        cls, reference: Reference, compared_by: str, num_modules: int, left_out: tuple[str, ...]
    ) -> "Fingerprint":
        """Keep what `reference` found."""
        return cls(
            by=reference.by,
            prompts=tuple((*prompt,) for prompt in reference.prompts),
            ids=_bytes(reference.ids.int()),
            logits=_bytes(reference.logits),
            noise=_bytes(reference.noise),
            routed=reference.routed,
            pooled=reference.pooled,
            compared_by=compared_by,
            num_modules=num_modules,
            left_out=left_out,
            scores=None
            if reference.scores is None
            else (_bytes(reference.scores.values), reference.scores.noise),
        )

    def reference(self, device: torch.device, vocab_size: int, width: int) -> Reference:
        """Return the reference on `device`, without modules and layers.

        Args:
            device: of the model.
            vocab_size: ids of tokens are below it.
            width: numbers at a position, some of which are compared: logits, or channels.

        Raises:
            ValueError: its parts do not go together, or not with the model.
        """
        prompts = tuple(CheckPrompt(*prompt) for prompt in self.prompts)
        if not prompts:
            raise ValueError("its parts do not go together: it has no prompts")
        positions = COUNT * len(prompts)
        ids = _array(self.ids, np.int32).reshape(positions, -1)
        logits, noise = (_array(part, np.float32) for part in (self.logits, self.noise))
        tokens = [token for prompt in prompts for token in (*prompt.ids, *prompt.others)]
        if (
            any(len(prompt.ids) != COUNT or len(prompt.positions) != COUNT for prompt in prompts)
            or logits.size != ids.size
            or len(noise) != positions
            or not all(np.isfinite(part).all() for part in (logits, noise))
        ):
            raise ValueError("its parts do not go together")
        if (
            not 0 <= min(tokens) <= max(tokens) < vocab_size
            or not 0 <= ids.min() <= ids.max() < width
        ):
            raise ValueError("it has ids that the model does not have")
        return Reference(
            prompts,
            self.by,
            torch.from_numpy(ids).long(),
            torch.from_numpy(logits.reshape(ids.shape)),
            torch.from_numpy(noise),
            self.routed,
            scores=self._scores(),
            pooled=self.pooled,
        ).moved(device)

    def _scores(self) -> Scores | None:
        if self.scores is None:
            return None
        values, noise = _array(self.scores[0], np.float32), self.scores[1]
        if not values.size or values.size % len(self.prompts) or not np.isfinite(values).all():
            raise ValueError("its scores are not those of its prompts")
        return Scores(torch.from_numpy(values.reshape(len(self.prompts), -1)), noise)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def _array(data: bytes, dtype: Any) -> Any:
    return np.frombuffer(bytearray(data), dtype)


def key_of(weights_id: str, dtype: torch.dtype, *more: object) -> str:
    """Return the name of a fingerprint, 32 hex digits; `more` is what else determines it."""
    parts = (_FORM, weights_id, dtype, transformers.__version__, *more)
    return blake3(repr(tuple(map(str, parts))).encode()).digest(16).hex()


def comparer(*settings: object) -> str:
    """Identify the code that replaces modules, where it runs, and `settings` that change it."""
    flags = ",".join(sorted(cpu_features()))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    native = kernels()
    compiled = () if native is None else native.files
    parts = (
        inlay.__version__, torch.__version__, _sources(), flags, compiled, gpu,
        torch.get_num_threads(), *settings,
    )  # fmt: skip
    return blake3(repr(tuple(map(str, parts))).encode()).digest(16).hex()


def _sources() -> str:
    """Return a digest of the sources of the engine: a release is not all that may change them."""
    root = Path(inlay.__file__).parent / "engine"
    found = blake3()
    for part in ("torch", "embed"):
        for file in sorted((root / part).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                found.update(file.read_bytes())
    return found.digest(16).hex()


def find(key: str, kept: References | None = None) -> Fingerprint | None:
    """Return a fingerprint `kept`, or where this process keeps them; None if none can be read."""
    data = (kept or references()).find(key)
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=Fingerprint)
    except msgspec.MsgspecError as error:
        _logger.info("the self-check of an earlier start is not used: %s", error)
        return None


def keep(key: str, fingerprint: Fingerprint) -> None:
    """Keep a fingerprint for later starts."""
    references().keep(key, msgspec.msgpack.encode(fingerprint))
