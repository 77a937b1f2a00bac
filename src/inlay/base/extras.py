"""Commands that install what an optional part of inlay needs.

Only this module knows the name on PyPI, where `inlay` is another project.
"""

DISTRIBUTION = "inlay-server"
"""Name on PyPI, as in pyproject.toml."""


def install(*extras: str) -> str:
    """The command that installs inlay with these extras of pyproject.toml, for a shell."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
