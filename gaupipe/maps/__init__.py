"""Attention maps as numbers: Gaussians over the token grid, maps that move with their image."""
