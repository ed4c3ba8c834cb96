"""The teachers of phase A: per-image Gaussians, or an ordinary vision transformer."""
