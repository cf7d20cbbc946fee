"""Data flow of a run: plan, prepare, score, audit, publish. No torch, no Spark, no Airflow."""
