"""APIs that clients speak: request and response types."""
