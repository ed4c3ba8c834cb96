"""``python -m gaupipe`` is the command ``gaupipe``."""

from gaupipe.cli import main

if __name__ == "__main__":
    main()
