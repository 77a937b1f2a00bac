"""What is said between the parts: `openai` by clients, `request` to workers, `frames` as bytes."""
