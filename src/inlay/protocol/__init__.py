"""What is said between the parts: `openai` by clients, `work` to workers, `frames` as bytes."""
