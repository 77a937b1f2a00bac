"""Parsers of model outputs, one for each format of reasoning or tool calls.

They are generators over a `source.TextSource`, which reads text in pieces as if it were complete.
So the result does not depend on how the text is cut, and malformed calls become content.
"""
