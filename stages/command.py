"""The command ``gaupipe``. Python imports this module before the package, which knows by it that it
may leave torch and timm for later."""


def main() -> None:
    from gaupipe.cli import main

    main()
