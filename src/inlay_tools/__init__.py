"""Commands beside the server: `bench`, `plan`, `chat`, `doctor`, `convert`, `embeds`, `completion`.

    commands.py, settings.py    the commands, and what each takes
    http_client.py              the server that `chat`, `bench`, `plan` and `embeds audit --url` ask
    files.py                    files that commands read and write
    bench/, plan/, chat/        those that are more than a module

The other modules are the commands.
"""

from inlay.extension import Extension

extension = Extension("tools", commands="inlay_tools.commands:COMMANDS")
