"""Ratios against what a user would pick instead, each from one run: `make bench`."""
