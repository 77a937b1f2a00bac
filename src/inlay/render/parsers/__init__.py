"""Parsers of models' outputs, one for each form in which models write reasoning and tool calls."""
