"""The version of gaupipe."""

__version__ = "0.2.0.dev0"  # the only place; pyproject.toml reads it
