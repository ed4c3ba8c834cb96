"""Phase A: the training of the teacher, per-image Gaussians or an ordinary vision transformer."""
