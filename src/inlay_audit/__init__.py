"""A measure of what rows reveal: known attacks on the rows of known texts.

    prompts.py                  texts as prompts: token ids, the user's part
    entities.py                 names and numbers in a text
    transform.py                a `Transform`: what is sent in place of the table's rows
    external.py                 a user's function, command or rows; files of rows
    attacker.py, attackers/     an `Attacker`: guesses tokens; one module for each family
    score.py, interval.py       counts of each prompt; shares, with intervals over prompts
    answers.py                  a model's answers to the same rows
    neural/                     all that needs torch: the whole model, trained networks
    run.py                      a transform against all attackers
    report.py                   a table, JSON, the gate; a picture
    command.py                  `inlay embeds audit`; server_answers.py asks a server

To add an attacker, write a class with `name`, `knows`, `fit` and `guess` (see `attacker.py`, and
`attackers/nearest.py` for the shortest) and name it in `attackers/__init__.py`.
"""

from inlay.extension import Extension

extension = Extension("audit", commands="inlay_audit.commands:COMMANDS")
