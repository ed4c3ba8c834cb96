"""Attention maps of images, looked at in the terminal and as a picture."""
