"""Routes of files and batches, `/v1/files` and `/v1/batches`. No line is run here."""
