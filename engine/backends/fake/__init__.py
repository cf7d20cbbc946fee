"""A backend without a model: log-probabilities from a hash."""
