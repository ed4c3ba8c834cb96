"""State, update, optimizer, epochs and logs that the loops in ``stages`` call."""
