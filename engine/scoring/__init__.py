"""Multi-item scoring: all candidates of all users of a pack in one pass over their token trees."""
