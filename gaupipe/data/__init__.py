"""Data sets with a stable image id, their augmentation, and the batches made from them."""
