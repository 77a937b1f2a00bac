"""What an output must match.

Compiled grammars, where an output stands in one, and the masks of a step.
"""
