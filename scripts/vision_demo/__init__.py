"""Training of the bundled model with images: pictures, questions, the model and its files."""
