"""Types of requests and responses of images and speech."""
