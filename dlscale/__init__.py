"""The support library of the dlscale course: see the notebooks, which begin with 00_start_here."""

__version__ = "0.1.0"
