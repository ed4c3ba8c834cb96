"""Arguments of the command line, as the tests write them."""


def sets(*settings: str) -> list[str]:
    """``--set`` before each of the settings."""
    return [argument for setting in settings for argument in ("--set", setting)]
