"""Around runs: what state they are in, a range of days, and what may be removed."""
