"""The ground floor: what every subject stands on, and which knows none of them."""
