"""Write the variables of nats.conf that hold the password.

    access.py PASSWORD TARGET [HOST:PORT]...

PASSWORD and TARGET are files; each HOST:PORT is a server of the cluster. A variable of the
environment would be read as NATS' own syntax: 123 as a number, a space as the end.
"""

import os
import sys
from pathlib import Path
from urllib.parse import quote

password = Path(sys.argv[1]).read_bytes().rstrip(b"\r\n")
lines = ['PASSWORD: "' + "".join(f"\\x{byte:02X}" for byte in password) + '"']
lines += [
    f'ROUTE_{number}: "nats://inlay:{quote(password, safe="")}@{host}"'
    for number, host in enumerate(sys.argv[3:])
]
os.umask(0o027)
Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
