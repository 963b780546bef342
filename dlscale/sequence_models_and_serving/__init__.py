"""Sequences, and how to serve what was trained on them: layers over time, CTC and sound; batches for requests."""
