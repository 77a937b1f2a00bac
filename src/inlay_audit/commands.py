"""The command of this extension."""

from inlay.cli.command import Command
from inlay_audit.settings import AuditSettings

COMMANDS = (
    Command(
        name="embeds audit",
        summary="Measure how much known attacks read from prompt embeddings.",
        details="Sends texts through each transform and has attackers guess the tokens: a lower "
        "bound of what rows reveal, beside what could be guessed without them. More texts give "
        "narrower intervals.",
        module="inlay_audit.command",
        settings=AuditSettings,
    ),
)
