"""Pictures and numbers of attention that a training writes beside its metrics."""
