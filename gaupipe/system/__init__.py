"""Files, processes, signals and messages: what every other package may use."""
