"""What an output must match: compiled grammars, where an output stands in one, and the masks of a step."""
