"""The gates between a finished run and what readers see. Nothing is published that one refuses."""
