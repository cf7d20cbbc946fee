"""Where input tables come from: files by their names, tables by their logs, columns by folders."""
