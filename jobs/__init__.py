"""How a run is launched: the command line and the launchers. Loads no torch and no pyspark."""
