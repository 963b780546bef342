"""The room of 00_start_here: its exercises and its claims."""
