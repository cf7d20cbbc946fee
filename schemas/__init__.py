"""Contracts every other layer speaks in: errors, settings, tables, semantic IDs, runs."""
