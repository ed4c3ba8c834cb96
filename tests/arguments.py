"""Arguments of the command line, as the tests write them, and messages to the page of view."""


def sets(*settings: str) -> list[str]:
    """``--set`` before each of the settings."""
    return [argument for setting in settings for argument in ("--set", setting)]


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
