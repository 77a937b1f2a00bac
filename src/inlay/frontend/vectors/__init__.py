"""Vectors and scores of inputs."""
