"""The one exception that the command line shows without a traceback."""


class UserError(ValueError):
    """The user's mistake: one line saying what is wrong, where, and what would be right."""
