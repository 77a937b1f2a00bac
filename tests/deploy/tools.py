"""Tools that tests of `deploy/` run, found or the test is skipped with a reason.

`make test-deploy` fetches what it can into `build/deploy-tools` (`scripts/deploy_tools.py`); tools
on the path serve as well.
"""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "build" / "deploy-tools"


def tool(name: str) -> str:
    """The path of a program; skips the test where there is none."""
    fetched = TOOLS / "bin" / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make test-deploy fetches what it can")
    return found


def helms() -> dict[str, str]:
    """Name and path of each Helm there is."""
    found = {path.name: str(path) for path in sorted(TOOLS.glob("bin/helm*"))}
    own = shutil.which("helm")
    return found or ({} if own is None else {"helm": own})
