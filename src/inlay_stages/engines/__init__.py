"""Engines of stages: diffusers, vLLM-Omni, and speech."""
