"""From a checkpoint to a model that can be run, with faster modules in it."""
