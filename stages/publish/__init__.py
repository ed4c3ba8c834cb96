"""A student as a folder for others: weights, model card, ONNX and exported programs."""
