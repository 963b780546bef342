"""What a notebook shows: figures, and explorers that answer to their controls."""
