"""The losses of phase B, the kinds of stored maps, and the student that learns from them."""
