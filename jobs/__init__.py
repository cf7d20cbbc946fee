"""How a run is launched: the command line and the launchers. Loads no torch and no pyspark."""

from jobs.memory import return_freed_memory

return_freed_memory()  # before polars and pyarrow are loaded
