"""What the engine does with a pack of users behind its prefill: one module per task.

`tasks_of` gives the tasks of a run. Several may share one prefill: candidates are scored, and beams
searched, behind the same prompts. `task.py` says what a task is.
"""
