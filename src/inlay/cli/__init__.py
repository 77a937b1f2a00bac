"""The command line.

    main.py       extensions, then dispatch.py: the command that the words name
    commands.py   all commands, also of extensions: name, summary, settings class, function
    settings.py   settings classes; each joins the settings of the rooms that it configures
    options.py    fields of a settings class as flags, environment variables and config keys
    reading.py    flags over environment over config file over defaults, and their errors
    usage.py      `--help`; reference.py makes docs/cli.md from the same
    vllm_flags.py flags of `vllm serve` that inlay does not have, and what to use instead
    process.py    output streams, progress of long waits, signals, event loop

The other modules are the commands. Each is imported only when its command runs, so that `--help`
is quick. A settings class is the only source of a command's flags, variables, keys and reference.

Exit status: 0 done, 1 failed, 2 invalid command line, 130 interrupted.
"""

from inlay.cli.process import default_sigint

with default_sigint():
    from inlay.cli.main import main

__all__ = ["main"]
