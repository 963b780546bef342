"""The room of 00_start_here: its exercise and its claim."""
