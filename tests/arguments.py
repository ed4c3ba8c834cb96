"""Arguments of the command line, as the tests write them, and messages to the page of view."""

import json

import numpy as np


def sets(*settings: str) -> list[str]:
    """``--set`` before each of the settings."""
    return [argument for setting in settings for argument in ("--set", setting)]


def unpacked(message: bytes, name: str) -> tuple[dict, np.ndarray]:
    """The header and one array of a message to the page (stages/view/wire.py)."""
    length = int.from_bytes(message[:4], "little")
    header = json.loads(message[4 : 4 + length])
    dtype, shape, offset = header["arrays"][name]
    count = int(np.prod(shape))
    return header, np.frombuffer(message, dtype, count, 4 + length + offset).reshape(shape)


def tiny(images: int, batch_size: int, epochs: int, depth: int = 2) -> list[str]:
    """Settings of a training that takes a second or two."""
    return [
        f"data.train_images={images}",
        f"data.batch_size={batch_size}",
        f"phase_a.max_epochs={epochs}",
        "phase_a.stop_accuracy=1.0",
        f"train.epochs={epochs}",
        f"model.args={{depth: {depth}, embed_dim: 16, num_heads: 2}}",
        "threads=1",
    ]
