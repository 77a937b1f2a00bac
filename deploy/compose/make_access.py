"""Make what members and clients of a fleet log in with: `make_access.py DIRECTORY`.

    members.nk    the nkey of NATS
    keys.yaml     one key for clients, one for admins

What is there already stays.
"""

import os
import secrets
import sys
from pathlib import Path

from inlay.cli.nats import public_key


def main() -> None:
    """Make the files, readable by this user alone."""
    directory = Path(sys.argv[1])
    os.umask(0o077)
    public_key(directory / "members.nk")
    keys = directory / "keys.yaml"
    if not keys.exists():
        draft = keys.with_suffix(".tmp")
        draft.write_text(
            f"- name: client\n  key: sk-{secrets.token_hex(20)}\n"
            f"- name: admin\n  key: sk-{secrets.token_hex(20)}\n  admin: true\n"
        )
        draft.rename(keys)


if __name__ == "__main__":
    main()
