"""How good the lists of a run are (`evaluate`), and what differs between two runs (`compare`)."""
