"""The room of 01_sgd: its exercises and claims. All that it teaches stands in the notebook."""
