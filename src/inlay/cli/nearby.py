"""Models on this machine, for a command that was given none."""

import os
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_MOST = 3
"""Names of each kind."""

_LOOKED_AT = 200
"""Directories and files that are looked at."""


def models_nearby() -> str:
    """A clause behind "MODEL is missing": what is here, copies of the hub's, the demo."""
    here = [shlex.quote(str(path)) for path in islice(_models(Path()), _MOST)]
    kept = list(islice(_in_hub_cache(), _MOST))
    said = [f"models here: {', '.join(here)}"] if here else []
    said += [f"downloaded from the hub: {', '.join(kept)}"] if kept else []
    said += ["or try the bundled one: inlay demo"]
    return f"; {'; '.join(said)}"


def _models(under: Path) -> Iterator[Path]:
    """Directories with a configuration and weights, and GGUF files, at most two below."""
    looked_at = 0
    for folder in ("", "*/", "*/*/"):
        for name in ("config.json", "*.gguf"):
            for found in under.glob(folder + name):
                looked_at += 1
                if looked_at > _LOOKED_AT:
                    return
                if found.suffix == ".gguf":
                    yield found
                elif any(found.parent.glob("*.safetensors")):
                    yield found.parent


def _in_hub_cache() -> Iterator[str]:
    """Names on the hub whose files `huggingface_hub` has kept; it is not imported for this."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for kept in sorted(cache.glob("models--*--*")):
        if any(kept.glob("snapshots/*/*.safetensors")):
            yield kept.name.removeprefix("models--").replace("--", "/")
